"""The file that holds the secret of a stack, or a token with a role.

Invariants: a file that others than its owner can read is never used, except one of root's that its group
reads, as container engines mount secrets; the one that `flotilla up` makes is complete from
the moment that it has its name, and is replaced as a whole or not at all. A process that keeps a `TokenFile` has the
new secret at its next call after the file was replaced; the one before it is accepted for a stated time, counted from
the replacement, and no older one ever is.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla_core.errors import (
    FailedPrecondition,
    FlotillaError,
    InvalidConfig,
    PermissionDenied,
    Unavailable,
)
from flotilla_core.trust.role_tokens import clock, opened

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig
    from flotilla_core.config.stack import TlsConfig

TOKEN_FILE = "token"
OVERLAP_S = 600.0
_TELL_EVERY_S = 60.0
_MOST_BYTES = 64 * 1024
_MOST_TOKENS = 2

logger = logging.getLogger(__name__)


class Token:
    """A token that stays as it is."""

    def __init__(self, text: str, tls: TlsConfig | None = None) -> None:
        """`tls` is how the services are dialled for which the token is."""
        self._current = text
        self.tls = tls

    @staticmethod
    def of(token: str | Token) -> Token:
        """Return the token of a text; one that is a token already stays itself."""
        return token if isinstance(token, Token) else Token(token)

    def current(self) -> str:
        """Return the token that signs now."""
        return self._current

    def accepted(self) -> tuple[str, ...]:
        """Return the tokens whose signatures are good now."""
        return (self.current(),)


class TokenFile(Token):
    """The token that is in a file, which may be replaced at any time."""

    def __init__(
        self,
        path: Path,
        key: str = "the token file",
        *,
        overlap_s: float = OVERLAP_S,
        tls: TlsConfig | None = None,
    ) -> None:
        """`overlap_s` is for how long after a replacement the previous token is accepted."""
        self.path = path.absolute()
        self._key = key
        self._overlap_s = overlap_s
        self._previous: tuple[str, float] | None = None
        """The token before this one, and when on the monotonic clock it ends."""
        self._told_s = -_TELL_EVERY_S
        self._mark = _mark(os.stat(path)) if path.exists() else None
        words = _read_words(self.path, key)
        self._also = words[1:]
        super().__init__(words[0], tls)

    @classmethod
    def of_stack(cls, bind: BindConfig, directory: Path) -> TokenFile:
        """Return the token of the stack whose files are in `directory`."""
        return cls(*_place(bind, directory), overlap_s=bind.token_overlap_s, tls=bind.tls)

    def current(self) -> str:
        self._look()
        return self._current

    def accepted(self) -> tuple[str, ...]:
        self._look()
        previous = self._previous
        if previous is None or time.monotonic() >= previous[1]:
            return (self._current, *self._also)
        return (self._current, *self._also, previous[0])

    def _look(self) -> None:
        """Take what the file holds where it was replaced; where it cannot be used, what is known stays good."""
        try:
            status = os.stat(self.path)
        except OSError:
            return  # Between the removal of the old file and the writing of the new one.
        mark = _mark(status)
        if mark == self._mark:
            return
        try:
            token, *also = _read_words(self.path, self._key)
        except (FlotillaError, OSError) as error:
            # It is read again at the next call, because a shared disk may have been at fault.
            if time.monotonic() - self._told_s >= _TELL_EVERY_S:
                self._told_s = time.monotonic()
                logger.warning("the replaced token file is not used, the token stays: %s", error)
            return
        self._mark, self._also = mark, tuple(also)
        if token == self._current:
            return
        # The change of the inode cannot be set to another time, so a late look does not lengthen the overlap.
        replaced_s = min(status.st_ctime, time.time())
        left_s = replaced_s + self._overlap_s - time.time()
        self._previous = (self._current, time.monotonic() + left_s)
        self._current = token
        logger.info(
            "the token of %s was replaced; the previous one is accepted until %s",
            self.path,
            clock(replaced_s + self._overlap_s),
        )


def _mark(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def read_token(bind: BindConfig, directory: Path) -> str:
    """Return the secret of the stack whose files are in `directory`.

    Services, the command line, the SDK and tools all find it here: in the file that `bind.token_file` names, else in
    the one that `flotilla up` made.
    """
    return _read_words(*_place(bind, directory))[0]


def _place(bind: BindConfig, directory: Path) -> tuple[Path, str]:
    """Return the token file of a stack, and what errors call it."""
    if bind.token_file is not None:
        return bind.token_file, "bind.token_file"
    return directory / TOKEN_FILE, "the stack's token file"


def _read_words(path: Path, key: str) -> tuple[str, ...]:
    """Return the token that signs, and after it one that is accepted as well where the file has a second line."""
    words = tuple(line.strip() for line in read_secret(path, key).split("\n") if line.strip())
    if len(words) > _MOST_TOKENS or any(
        not word.isascii() or not word.isprintable() or " " in word for word in words
    ):
        raise InvalidConfig(
            "the stack's token is not one printable word",
            where=f"{key} {path}",
            next_step=f"write a random one: openssl rand -hex 32 > {path} (while hosts change to another one, that one "
            "on a second line)",
        )
    return words


def make_token(bind: BindConfig, directory: Path) -> str:
    """Return the secret of the stack; make it where the stack has none yet."""
    path = directory / TOKEN_FILE
    if bind.token_file is None and not path.exists():
        aside = _write_aside(path, secrets.token_hex(32))
        try:
            # A link, unlike a rename, leaves a token alone that another process has made meanwhile.
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return read_token(bind, directory)


def rotate_token(bind: BindConfig, directory: Path) -> Path:
    """Replace the secret of a stack by a new one, and return its file; whoever uses it learns of it by itself."""
    path, _ = _place(bind, directory)
    if bind.token_file is not None:
        raise FailedPrecondition(
            "the stack's token is in a file of yours",
            where=f"bind.token_file {path}",
            why="it may have copies, or another program may write it",
            next_step=f"replace it yourself, on each host: (umask 077; openssl rand -hex 32 > {path}.new; "
            f"mv {path}.new {path})",
        )
    read_token(bind, directory)
    write_secret(path, secrets.token_hex(32))
    return path


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    os.replace(_write_aside(path, text), path)


def _write_aside(path: Path, text: str) -> Path:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)  # a full disk shall not keep parts of secrets
        raise
    return aside


def check_is_secret(token: str, where: str) -> None:
    """Raise InvalidConfig for a token with a role, by which no service of the stack can work."""
    role = opened(token)
    if role is not None:
        raise InvalidConfig(
            f"a token with the role {role[0].role} is for callers",
            where=where,
            why="a service knows the secret of the stack, by which it checks such tokens",
            next_step="name the stack's own token in bind.token_file, or leave the key out",
        )


def read_secret(path: Path, key: str) -> str:
    """Return the text of a file that only its owner can read (or root and our group); errors call it `key`."""
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
        if mode & (0o037 if mounted else 0o077):
            raise InvalidConfig(
                "the file of a secret is open to other users",
                where=where,
                why=f"its mode is {mode:04o}, so a secret in it is none",
                next_step=f"run: chmod {440 if mounted else 600} {path}, and write a new secret where others may have "
                "read this one",
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
