"""A small disk that a test fills and frees: a tmpfs of its own, so that no other file suffers."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from flotilla_core.disk import free_bytes

MIB = 1 << 20


class SmallDisk:
    """A mounted disk, and the file that fills it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / ".filler"

    def fill(self, leave: int = 0) -> None:
        """Take everything but `leave` bytes, whoever else writes meanwhile."""
        with self._filler.open("ab", buffering=0) as file:
            while (free := free_bytes(self.path) - leave) > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(path: Path, mib: int = 96) -> Iterator[SmallDisk]:
    """A tmpfs of `mib` at `path`, until the block ends; raises PermissionError where nothing may be mounted here."""
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        raise PermissionError(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
