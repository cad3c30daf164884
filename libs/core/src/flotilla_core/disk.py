"""What tells a disk that takes no more from every other failure, and says which disk it is.

Invariants: this module alone decides that a disk is full, whoever noticed it: the system, SQLite, or a library that
keeps the system's words; a message names the path, its mount point and the bytes that are free.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flotilla_core.errors import DiskFull, FailedPrecondition
from flotilla_core.files import make_private_folder

PROBE_BYTES = 256 << 10
"""Less is no room: the files of a start, and a page of each store, want as much."""
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
}
_CURE = {_FULL[errno.EROFS]: "mount it for writing, or use another disk"}
_SQLITE = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the disk is read-only",
    **dict.fromkeys(
        (
            sqlite3.SQLITE_IOERR_WRITE,
            sqlite3.SQLITE_IOERR_FSYNC,
            sqlite3.SQLITE_IOERR_DIR_FSYNC,
            sqlite3.SQLITE_IOERR_TRUNCATE,
            sqlite3.SQLITE_IOERR_SHMOPEN,
            sqlite3.SQLITE_IOERR_SHMSIZE,
            sqlite3.SQLITE_IOERR_SHMMAP,
        ),
        "the disk refuses to be written",
    ),
}


def why_full(error: BaseException) -> str:
    """What is wrong with the disk that `error` speaks of; empty where it is no such error."""
    if isinstance(error, OSError) and error.errno is not None:
        return _FULL.get(error.errno, "")
    if isinstance(error, sqlite3.Error):
        return _SQLITE.get(getattr(error, "sqlite_errorcode", 0), "")
    # Libraries in other languages (safetensors, torch) keep no number, only the words.
    text = str(error)
    return next((why for number, why in _FULL.items() if os.strerror(number) in text), "")


def disk_full(error: BaseException, what: str, where: Path) -> DiskFull | None:
    """The `DiskFull` that `error` is for whoever wrote to `where`; None where it is another failure."""
    why = why_full(error)
    if not why:
        return None
    return DiskFull(
        what,
        where=str(where),
        why=f"{why}: {room(where)}",
        next_step=_CURE.get(why, "free space there"),
    )


@contextmanager
def names_full_disk(what: str, where: Path) -> Iterator[None]:
    """Raise `DiskFull` for whatever in the block fails because the disk takes no more."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if (full := disk_full(error, what, where)) is None:
            raise
        raise full from error


def free_bytes(path: Path) -> int:
    """What the disk of `path` can take; the nearest folder that exists stands for it."""
    return shutil.disk_usage(nearest(path)).free


def room(path: Path) -> str:
    """The disk of `path` in numbers: where it is mounted, what is free of how much."""
    mount = nearest(path).resolve()
    while not mount.is_mount():
        mount = mount.parent
    usage = shutil.disk_usage(mount)
    return f"{mount} has {usage.free / 2**20:,.1f} MiB free of {usage.total / 2**20:,.1f}"


def check_state_directory(path: Path) -> None:
    """Make `path` where it is missing, for its owner alone, and try that it takes a file; raise what is wrong."""
    probe = path / f".probe-{secrets.token_hex(4)}"
    try:
        make_private_folder(path)
        try:
            with probe.open("wb") as file:
                file.write(b"\0" * PROBE_BYTES)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if full := disk_full(error, "the state directory cannot be written", path):
            raise full from error
        raise FailedPrecondition(
            "the state directory cannot be used",
            where=str(path),
            why=error.strerror or str(error),
            next_step="make it a directory that you may write, or set state_dir in the stack file to another one",
        ) from error


def lacks_room(folder: Path) -> DiskFull | None:
    """Why `folder` takes no file now, where its disk takes no more."""
    try:
        check_state_directory(folder)
    except DiskFull as full:
        return full
    except FailedPrecondition:
        return None  # another trouble, which whoever works there meets and names
    return None


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    found = path.absolute()
    while not found.exists():
        found = found.parent
    return found
