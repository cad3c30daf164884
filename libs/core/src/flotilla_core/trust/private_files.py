"""Files that hold a secret.

Invariants: a file that others than its owner can read is never used, except one of root's that its group reads, as
container engines mount secrets; nor is one that others can write, even where they may read it; one that is written is
complete from the moment that it has its name, and is replaced as a whole or not at all.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from flotilla_core.errors import InvalidConfig, PermissionDenied
from flotilla_core.files import write_atomically

_MOST_BYTES = 64 * 1024


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    write_atomically(path, text, is_lasting=True)


def write_secret_once(path: Path, text: str) -> None:
    """Write a file as `write_secret` does, unless it is there: of two processes that write, the first one wins."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_secret(aside, text)
    try:
        # A link, unlike a rename, leaves a file alone that another process has made meanwhile.
        os.link(aside, path)
    except FileExistsError:
        pass
    finally:
        aside.unlink()


def read_secret(path: Path, key: str, *, is_public: bool = False) -> str:
    """Return the text of a file that only its owner can read (or root and our group); errors call it `key`.

    One that `is_public` may be read by all, but others may not write it either.
    """
    where = f"{key} {path}"
    try:
        # Not blocked by a named pipe, and judged as it was opened, not as it may be later.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidConfig("the file of a secret is not there", where=where) from None
    except OSError as error:
        raise PermissionDenied(
            "the file of a secret cannot be read",
            where=where,
            why=str(error.strerror),
            next_step="work as the user who owns it",
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise InvalidConfig("the file of a secret is not a file", where=where)
    with open(descriptor, "rb") as file:
        # Root reads every file anyway, so a file of root's that we can read is as private as one of ours.
        mounted = status.st_uid == 0 and os.geteuid() != 0
        if status.st_uid != os.geteuid() and not mounted:
            raise InvalidConfig(
                "the file of a secret belongs to another user",
                where=where,
                why=f"its owner is uid {status.st_uid}, and this process runs as uid {os.geteuid()}",
                next_step=f"make a copy of your own, and run: chmod 600 {path}",
            )
        mode = stat.S_IMODE(status.st_mode)
        closed = 0o022 if is_public else 0o037 if mounted else 0o077
        if mode & closed:
            raise InvalidConfig(
                "the file of a secret is open to other users",
                where=where,
                why=f"its mode is {mode:04o}",
                next_step=f"run: chmod {440 if mounted else 644 if is_public else 600} {path}, and make a new secret "
                "where others may have read or written this one",
            )
        content = file.read(_MOST_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidConfig("the file of a secret is not text", where=where) from None
    if not text.strip():
        raise InvalidConfig("the file of a secret is empty", where=where)
    return text
