"""The file that holds the secret of a stack.

Invariants: a file that others than its owner can read is never used; the one that `flotilla up` makes is complete from
the moment that it has its name, and is never written again.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla_core.errors import FlotillaError, InvalidConfig, PermissionDenied, Unavailable

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

TOKEN_FILE = "token"
_MOST_BYTES = 64 * 1024


def read_token(bind: BindConfig, directory: Path) -> str:
    """Return the secret of the stack whose files are in `directory`.

    Services, the command line, the SDK and tools all find it here: in the file that `bind.token_file` names, else in
    the one that `flotilla up` made.
    """
    if bind.token_file is not None:
        path, key = bind.token_file, "bind.token_file"
    else:
        path, key = directory / TOKEN_FILE, "the stack's token file"
    token = read_secret(path, key).strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfig(
            "the stack's token is not one printable word",
            where=f"{key} {path}",
            next_step=f"write a random one: openssl rand -hex 32 > {path}",
        )
    return token


def make_token(bind: BindConfig, directory: Path) -> str:
    """Return the secret of the stack; make it where the stack has none yet."""
    path = directory / TOKEN_FILE
    if bind.token_file is None and not path.exists():
        aside = path.with_name(f".{TOKEN_FILE}.{secrets.token_hex(4)}")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(f"{secrets.token_hex(32)}\n")
                file.flush()
                os.fsync(file.fileno())
            # A link, unlike a rename, leaves a token alone that another process has made meanwhile.
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return read_token(bind, directory)


def read_secret(path: Path, key: str) -> str:
    """Return the text of a file that only its owner can read; `key` is what errors call it."""
    where = f"{key} {path}"
    try:
        # Not blocked by a named pipe, and judged as it was opened, not as it may be later.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _missing(key, path) from None
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
        if status.st_uid != os.geteuid():
            raise InvalidConfig(
                "the file of a secret belongs to another user",
                where=where,
                why=f"its owner is uid {status.st_uid}, and this process runs as uid {os.geteuid()}",
                next_step=f"make a copy of your own, and run: chmod 600 {path}",
            )
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise InvalidConfig(
                "the file of a secret is open to other users",
                where=where,
                why=f"its mode is {mode:04o}, so a secret in it is none",
                next_step=f"run: chmod 600 {path}, and write a new secret where others may have read this one",
            )
        content = file.read(_MOST_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidConfig("the file of a secret is not text", where=where) from None
    if not text.strip():
        raise InvalidConfig(
            "the file of a secret is empty",
            where=where,
            next_step=f"write a random secret: openssl rand -hex 32 > {path}",
        )
    return text


def _missing(key: str, path: Path) -> FlotillaError:
    if path.name == TOKEN_FILE and not key.startswith("bind"):
        return Unavailable(
            "the stack has no token",
            where=str(path),
            why="it has not been started here yet, or an older Flotilla started it",
            next_step="start it: flotilla up (where it runs already: flotilla down first). On another host: copy its "
            "token file to this place, or name a copy in bind.token_file",
        )
    return InvalidConfig("the file of a secret is not there", where=f"{key} {path}")
