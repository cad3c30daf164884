"""Brings the files of a manifest into a folder of this host.

Invariants: a file has its name only when all of it is on disk and its SHA-256 is that of the manifest; what arrived of
one is kept under the digest of its content, and the next download goes on behind it. A file that arrived damaged is
named, and none of it is kept. One part of one file is in memory at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

from flotilla_core.checkpoint.manifest import SHA256, SealedFile, flush_directory
from flotilla_core.disk import free_bytes, names_full_disk, room
from flotilla_core.errors import Damaged, DiskFull, Unavailable
from flotilla_core.files import make_private_folder
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.transfer.folders import FolderManifest

Parts = Callable[[str, int], AsyncGenerator[bytes]]
"""Yields what a file has from an offset on."""
PARTS = ".parts"


class Download:
    """One folder on its way."""

    def __init__(
        self,
        parts: Parts,
        manifest: FolderManifest,
        aside: Path,
        arrived: Callable[[int], None],
    ) -> None:
        self._read = parts
        self._manifest = manifest
        self._aside = aside
        self._parts = aside / PARTS
        self._arrived = arrived
        """Called with the bytes that are there so far."""
        self._nbytes = 0

    async def run(self) -> None:
        """Return when every file is there; bring what is missing."""
        make_private_folder(self._parts)
        missing = {}
        for name, file in self._manifest.files.items():
            path = self._aside / name
            if path.is_file() and path.stat().st_size == file.nbytes:
                self._nbytes += file.nbytes
            else:
                missing[name] = file
        self._require_room(missing)
        with names_full_disk("the files of another host cannot be written", self._aside):
            for name, file in missing.items():
                await self._bring(name, file)
            await asyncio.to_thread(self._settle)

    def _require_room(self, missing: dict[str, SealedFile]) -> None:
        needed = sum(file.nbytes for file in missing.values())
        needed -= sum(part.stat().st_size for part in self._parts.iterdir())
        if free_bytes(self._aside) < needed:
            raise DiskFull(
                "the files of another host cannot be written",
                where=str(self._aside),
                why=f"they need {needed:,} bytes more: {room(self._aside)}",
                next_step="free space there",
            )

    async def _bring(self, name: str, file: SealedFile) -> None:
        part = self._parts / file.sha256
        with part.open("ab+") as content:
            digest, offset = await asyncio.to_thread(_read_before, content, file.nbytes)
            before = self._nbytes
            self._report(before + offset)
            if offset < file.nbytes:
                async with aclosing(self._read(name, offset)) as parts:
                    async for data in parts:
                        offset += len(data)
                        if offset > file.nbytes:
                            break
                        await asyncio.to_thread(_append, content, digest, data)
                        self._report(before + offset)
            await asyncio.to_thread(_bring_to_disk, content)
        if offset < file.nbytes:
            raise Unavailable(
                "the file ended early", where=name, why=f"{offset} of {file.nbytes} bytes arrived"
            )
        # The storage that has a file may know no SHA-256 of it.
        known = SHA256.fullmatch(file.sha256) is not None
        if offset > file.nbytes or (known and digest.hexdigest() != file.sha256):
            part.unlink()
            raise Damaged(
                f"{name} arrived damaged",
                where=str(self._aside),
                why="its SHA-256 is not that of the file that was offered",
                next_step="fetch it again; where it happens again, look at the network and at both disks",
            )
        target = self._aside / name
        make_private_folder(target.parent)
        os.replace(part, target)

    def _report(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._arrived(nbytes)

    def _settle(self) -> None:
        """Remove what is no file of the folder, and bring the names to the disk."""
        shutil.rmtree(self._parts)
        for directory in (*(child for child in self._aside.rglob("*") if child.is_dir()), self._aside):
            flush_directory(directory)


def _read_before(content: BinaryIO, nbytes: int) -> tuple[hashlib._Hash, int]:
    """Return the digest over what an earlier download left, and its size; more than the file has is dropped."""
    size = content.seek(0, os.SEEK_END)
    if size > nbytes:
        content.truncate(0)
    content.seek(0)
    digest, offset = hashlib.sha256(), 0
    while data := content.read(PART_BYTES):
        digest.update(data)
        offset += len(data)
    return digest, offset


def _bring_to_disk(content: BinaryIO) -> None:
    content.flush()
    os.fsync(content.fileno())


def _append(content: BinaryIO, digest: hashlib._Hash, data: bytes) -> None:
    content.write(data)
    digest.update(data)
