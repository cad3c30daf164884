"""Serves the folders that this process offers, by digest, by stamp, or by the name of a model.

Invariants: a call names a digest, a stamp or a model, never a path, and only what this process offered can be read
under it. The path behind an offer was resolved when it was offered. A file that changed since is refused, so what
travels is what the digest says. A call holds one part of one file in memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flotilla.common.v1 import files_pb2 as pb
from flotilla.common.v1 import files_pb2_grpc
from flotilla_core.errors import InvalidRequest, NotFound
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.transfer.folders import Digests, FolderManifest, FoundFile, found_files, stamp_of

SERVICE_NAME = "flotilla.common.v1.FileService"
MOST_OFFERS = 1000
"""Offers that a process remembers; the oldest are forgotten first."""
SAY_EVERY_S = 5.0


@dataclass(frozen=True)
class Offer:
    """One folder, as it was when it was offered."""

    path: Path
    files: dict[str, FoundFile]
    manifest: FolderManifest | None


class Reading:
    """A folder that is read for its manifest, once for all who ask meanwhile, and also when they go away."""

    def __init__(self, digests: Digests, files: Collection[FoundFile]) -> None:
        self.whole = sum(file.nbytes for file in files)
        self.nbytes = 0
        """The number of bytes that have been read so far."""
        work = asyncio.to_thread(digests.manifest, files, self._read)
        self.task = asyncio.create_task(work, name="read a folder that is offered")

    def _read(self, nbytes: int) -> None:
        self.nbytes += nbytes


class Offers:
    """The folders that this process offers, by stamp and by digest."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._offers: OrderedDict[str, Offer] = OrderedDict()
        self._models: dict[str, Callable[[], Path]] = {}
        self._readings: dict[str, Reading] = {}
        self._lock = threading.Lock()
        """Threads offer folders too, because to list one may take a while."""

    def offer(self, path: Path, *, sealed: bool = False) -> pb.FolderReference:
        """Offer a folder; only a file of code and a sealed checkpoint get their digest at once."""
        files = found_files(path, sealed=sealed)
        stamp = stamp_of(files)
        known = self._offers.get(stamp)
        if known is None or known.path != path:
            manifest = None
            if sealed:
                manifest = FolderManifest.sealed(path)
            elif path.suffix == ".py":
                manifest = self._digests.manifest(files)
            known = Offer(path, {file.name: file for file in files}, manifest)
        self._keep(stamp, known)
        digest = "" if known.manifest is None else known.manifest.digest
        return pb.FolderReference(path=str(path), stamp=stamp, digest=digest)

    def offer_model(self, name: str, folder: Callable[[], Path]) -> None:
        """Offer a model by name; its folder is looked for when somebody asks."""
        self._models[name] = folder

    async def resolved(self, name: str) -> str:
        """Return the digest or stamp behind the name of a model; any other name stays as it is."""
        if name not in self._models:
            return name
        reference = await asyncio.to_thread(lambda: self.offer(self._models[name]()))
        return reference.digest or reference.stamp

    async def manifest(self, name: str) -> FolderManifest:
        """Return the manifest behind a digest, a stamp or the name of a model; read the folder where nobody has."""
        name = await self.resolved(name)
        offer = self._offers.get(name)
        if offer is None:
            raise _not_offered(name)
        if offer.manifest is None:
            reading = self._readings.get(name)
            if reading is None:
                reading = self._readings[name] = Reading(self._digests, offer.files.values())
                reading.task.add_done_callback(partial(self._was_read, name, offer))
            return await asyncio.shield(reading.task)
        return offer.manifest

    def read_so_far(self, name: str) -> tuple[int, int]:
        """Return how many bytes of a folder have been read, and of how many; zeros where nobody reads it."""
        reading = self._readings.get(name)
        return (0, 0) if reading is None else (reading.nbytes, reading.whole)

    def file(self, digest: str, name: str) -> FoundFile:
        """Return a file of a folder that was offered."""
        offer = self._offers.get(digest)
        if offer is None or offer.manifest is None or offer.manifest.digest != digest:
            raise _not_offered(digest)
        if name not in offer.files:
            raise NotFound("the folder has no such file", where=f"{name!r:.200} of {offer.path}")
        return offer.files[name]

    def _was_read(self, name: str, offer: Offer, task: asyncio.Task[FolderManifest]) -> None:
        del self._readings[name]
        if not task.cancelled() and task.exception() is None:
            self._keep(name, Offer(offer.path, offer.files, task.result()))

    def _keep(self, stamp: str, offer: Offer) -> None:
        keys = [stamp] if offer.manifest is None else [stamp, offer.manifest.digest]
        with self._lock:
            for key in keys:
                self._offers[key] = offer
                self._offers.move_to_end(key)
            while len(self._offers) > 2 * MOST_OFFERS:
                self._offers.popitem(last=False)


def _not_offered(name: str) -> NotFound:
    return NotFound(
        "nothing is offered under this name",
        where=f"{name!r:.200}",
        why="this process did not offer it, or was started again since",
        next_step="ask whoever refers to it again: a run offers its files when it starts or is resumed",
    )


class FileServicer(files_pb2_grpc.FileServiceServicer):
    """FileService of one process."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: Any
    ) -> AsyncIterator[pb.GetManifestResponse]:
        name = await self._offers.resolved(request.name)
        said, _ = self._offers.read_so_far(name)
        reading = asyncio.create_task(self._offers.manifest(name))
        try:
            while not (await asyncio.wait({reading}, timeout=SAY_EVERY_S))[0]:
                nbytes, whole = self._offers.read_so_far(name)
                # A disk that hangs says nothing, so who asks does not wait for it for ever.
                if nbytes > said:
                    said = nbytes
                    yield pb.GetManifestResponse(read_bytes=nbytes, bytes=whole)
            yield reading.result().to_proto()
        finally:
            reading.cancel()

    async def ReadFile(self, request: pb.ReadFileRequest, context: Any) -> AsyncIterator[pb.ReadFileResponse]:
        found = self._offers.file(request.digest, request.name)
        if request.offset > found.nbytes:
            raise InvalidRequest(f"offset {request.offset} is beyond the end of {request.name}")
        with await asyncio.to_thread(found.open) as file:
            file.seek(request.offset)
            while data := await asyncio.to_thread(file.read, PART_BYTES):
                yield pb.ReadFileResponse(data=data)
