"""Copies of folders of other hosts, by digest, up to a limit.

Invariants: a folder under its digest is complete and verified; a process that uses one holds a lock on it until it
releases it or ends, and the kernel frees the lock then, so nothing in use is ever removed. At most one process of a
host fetches a digest at a time; the others wait and use its copy. What was used longest ago is removed first. Where
copies in use alone are above the limit, one more is fetched all the same, and a warning says so.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from flotilla_core.checkpoint.manifest import SHA256
from flotilla_core.disk import folder_bytes
from flotilla_core.errors import Exhausted, Unavailable
from flotilla_core.files import make_private_folder
from flotilla_core.logger import get_logger

POLL_S = 0.2
LOOK_EVERY_S = 5.0
FETCHING = ".fetching"
"""Ends the names of folders that are still growing."""
GIB = 1 << 30

logger = get_logger()


class FileCache:
    """`<state_dir>/<stack>/files/`."""

    def __init__(self, folder: Path, most_gib: float) -> None:
        self.folder = folder
        self._most_bytes = int(most_gib * GIB)
        self._held: dict[str, int] = {}
        """Open descriptors of the locks of what this process uses, by digest."""

    def aside(self, digest: str) -> Path:
        """Return the folder in which a copy grows."""
        return self.folder / f".{digest}{FETCHING}"

    def held(self, digest: str) -> Path | None:
        """Return the copy that this process uses already."""
        return self.folder / digest if digest in self._held else None

    @asynccontextmanager
    async def taking(self, digest: str, waits: Callable[[int], None]) -> AsyncIterator[Path | None]:
        """Yield the copy, or None to the one process that shall fetch it into `aside`; it is in use from then on.

        While another process fetches it, `waits` is called with the bytes that are there.
        """
        make_private_folder(self.folder)
        if (copy := self.held(digest)) is not None:
            yield copy
            return
        descriptor, exclusive = await self._lock(digest, waits)
        kept = False
        try:
            yield None if exclusive else self.folder / digest
            os.utime(self._lock_path(digest))
            if exclusive:
                self.aside(digest).rename(self.folder / digest)
                self._share(digest, descriptor)
            kept = digest not in self._held
            self._held.setdefault(digest, descriptor)
        finally:
            if not kept:
                os.close(descriptor)

    def release(self, digest: str) -> None:
        """Say that this process uses a copy no more; it stays until its room is needed."""
        if (descriptor := self._held.pop(digest, None)) is not None:
            os.close(descriptor)

    def make_room(self, digest: str, nbytes: int) -> None:
        """Remove what was used longest ago until a folder of so many bytes fits below the limit."""
        if nbytes > self._most_bytes:
            raise Exhausted(
                f"the folder has {nbytes:,} bytes, and copies of other hosts may have {self._most_bytes:,}",
                where=str(self.folder),
                next_step="raise file_cache_gib in stack.yaml",
            )
        locks = sorted(self.folder.glob("*.lock"), key=_last_used)
        sizes = {lock.stem: self._size(lock.stem) for lock in locks if SHA256.fullmatch(lock.stem)}
        # What arrived of it earlier is part of its bytes.
        sizes.pop(digest, None)
        total = sum(sizes.values())
        for other, size in sizes.items():
            if total + nbytes <= self._most_bytes:
                return
            if self._remove(other):
                total -= size
        if total + nbytes > self._most_bytes:
            logger.warning(
                "copies of folders of other hosts are above their limit, because all of them are in use",
                folder=str(self.folder),
                gib=round((total + nbytes) / GIB, 1),
                file_cache_gib=self._most_bytes / GIB,
            )

    def _share(self, digest: str, descriptor: int) -> None:
        """Let others use a copy that has arrived; for a moment the lock is free, and another may remove the copy."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            there = _is_at(descriptor, self._lock_path(digest)) and (self.folder / digest).is_dir()
        except BlockingIOError:
            there = False
        if not there:
            raise Unavailable(
                "a copy was removed when it had just arrived",
                where=str(self.folder / digest),
                why="another process needed the room",
                next_step="raise file_cache_gib in stack.yaml where this happens again",
            )

    def _remove(self, digest: str) -> bool:
        """Remove a copy that no process uses; return whether it is gone."""
        path = self._lock_path(digest)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leaving = self.folder / f".{digest}.removing"
            if (self.folder / digest).exists():
                (self.folder / digest).rename(leaving)
            for gone in (leaving, self.aside(digest)):
                shutil.rmtree(gone, ignore_errors=True)
            path.unlink()
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _size(self, digest: str) -> int:
        places = (self.folder / digest, self.aside(digest))
        return sum(folder_bytes(place) for place in places)

    async def _lock(self, digest: str, waits: Callable[[int], None]) -> tuple[int, bool]:
        """Return a lock on a digest: shared where there is a copy, else exclusive, for who fetches it."""
        path = self._lock_path(digest)
        look_at = time.monotonic()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            there = (self.folder / digest).is_dir()
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, (fcntl.LOCK_SH if there else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                # Another process may have removed the copy, with its lock, or made it, in between.
                if _is_at(descriptor, path) and (self.folder / digest).is_dir() == there:
                    return descriptor, not there
            os.close(descriptor)
            if time.monotonic() >= look_at:
                waits(await asyncio.to_thread(folder_bytes, self.aside(digest)))
                look_at = time.monotonic() + LOOK_EVERY_S
            await asyncio.sleep(POLL_S)

    def _lock_path(self, digest: str) -> Path:
        return self.folder / f"{digest}.lock"


def _last_used(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:  # another process removed it just now
        return 0.0


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
