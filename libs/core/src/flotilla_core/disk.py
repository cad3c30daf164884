"""Tells a full disk from every other failure, and says which disk it is.

Invariants: this module alone decides that a disk is full, whatever noticed it: the system, SQLite, or a library that
keeps the system's words; a message names the path, its mount point and the bytes that are free.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flotilla_core.errors import DiskFull, FailedPrecondition
from flotilla_core.files import make_private_folder

PROBE_BYTES = 256 << 10
"""The free bytes below which a disk counts as full: the files of a start, and a page of each store, need as much."""
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
    """Describe the disk error in `error`; return an empty text for any other error."""
    if isinstance(error, OSError) and error.errno is not None:
        return _FULL.get(error.errno, "")
    if isinstance(error, sqlite3.Error):
        return _SQLITE.get(getattr(error, "sqlite_errorcode", 0), "")
    # Libraries in other languages (safetensors, torch) keep no number, only the words.
    text = str(error)
    return next((why for number, why in _FULL.items() if os.strerror(number) in text), "")


def disk_full(error: BaseException, what: str, where: Path) -> DiskFull | None:
    """Return the `DiskFull` for a writer to `where` that got `error`; None for any other failure."""
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
    """Raise `DiskFull` for any failure in the block that is caused by a full disk."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if (full := disk_full(error, what, where)) is None:
            raise
        raise full from error


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, or on that of its nearest existing parent folder."""
    return shutil.disk_usage(nearest(path)).free


def room(path: Path) -> str:
    """Describe the disk of `path` in numbers: its mount point, its free bytes and its size."""
    mount = nearest(path).resolve()
    while not mount.is_mount():
        mount = mount.parent
    usage = shutil.disk_usage(mount)
    return f"{mount} has {usage.free / 2**20:,.1f} MiB free of {usage.total / 2**20:,.1f}"


def check_state_directory(path: Path) -> None:
    """Create `path` if it is missing, for its owner alone, and try to write a file; raise an error if that fails."""
    if control := next((one for one in str(path) if ord(one) < 0x20 or ord(one) == 0x7F), ""):
        raise FailedPrecondition(
            "the state directory cannot be used",
            where=ascii(str(path)),
            why=f"its name has the control character {control!a}, which files that name it cannot hold",
            next_step="rename the folder, or set state_dir in the stack file to another one",
        )
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
    """Return the error if `folder` takes no file now because its disk is full; None otherwise."""
    try:
        check_state_directory(folder)
    except DiskFull as full:
        return full
    except FailedPrecondition:
        return None  # another trouble, which the next user of the folder meets and names
    return None


def folder_bytes(folder: Path) -> int:
    """Count the bytes of the files below a folder that others write to or remove; what vanishes meanwhile counts 0."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def nearest(path: Path) -> Path:
    """Return the path itself, or the nearest existing folder above it."""
    found = path.absolute()
    while not os.path.exists(found):
        found = found.parent
    return found
