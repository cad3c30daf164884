"""The files of a session: in the run's directory, or on this host where the run's directory is on another one.

Invariants: a gang finds out at the opening of a session whether it shares the run's directory, by a key that the
coordinator wrote there. If it does, paths are used as they are. If not, what it reads is fetched, and what it writes
goes to a folder of its own and is offered from there: the run's newest checkpoint and its exported model, no more than
the session of one run. The coordinator has the copy that lasts. What is fetched is brought to every host of the gang
before the ranks are told to read it, and `give_up` ends that.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from flotilla.common.v1.files_pb2 import FolderReference
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.errors import Cancelled, FlotillaError
from flotilla_core.logger import get_logger
from flotilla_core.transfer import Files, move_functions, own_folder, shares
from flotilla_core.transfer.folders import FolderManifest

T = TypeVar("T")

logger = get_logger()


Bring = Callable[..., Awaitable[None]]
"""Brings a folder of the front's host to the other hosts of the gang."""


class SessionFiles:
    """Knows where the session of a gang reads and writes."""

    def __init__(self, files: Files, place: Path, bring: Bring) -> None:
        self._files = files
        self._place = place
        self._bring = bring
        self._fetches: set[asyncio.Task[Any]] = set()
        self._own: Path | None = None
        """The folder for what the session writes; None where it shares the run's directory."""

    async def open(self, request: pb.OpenSessionRequest) -> pb.OpenSessionRequest:
        """Return the request with paths of this host; what is not here is fetched."""
        return await self._while_wanted(self._opened(request), request.run_id)

    def give_up(self) -> None:
        """End the fetches that are under way: the session is being closed."""
        for fetch in self._fetches:
            fetch.cancel()

    async def _while_wanted(self, fetch: Coroutine[Any, Any, T], run_id: str) -> T:
        """Return what is fetched; raise when the session is closed before it is here."""
        task = asyncio.create_task(fetch, name=f"fetch for run {run_id}")
        self._fetches.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._fetches.discard(task)
        if task.cancelled():
            raise Cancelled(f"run {run_id} closed its session before its files were here")
        return task.result()

    async def _opened(self, request: pb.OpenSessionRequest) -> pb.OpenSessionRequest:
        here = pb.OpenSessionRequest()
        here.CopyFrom(request)
        spec = here.spec
        self._own = None
        if spec.HasField("run_directory") and not shares(spec.run_directory):
            self._own = own_folder(self._place, request.run_id)
            await asyncio.to_thread(self._forget_other_runs, request.run_id)
            if spec.dump_dir:
                spec.dump_dir = str(self._own / "dumps")
            logger.info("the run's directory is on another host", run_id=request.run_id, own=str(self._own))
        if spec.HasField("initial_folder"):
            weights = await self._files.here(spec.initial_folder, request.run_id)
            await self._bring(weights, sealed=False, run_id=request.run_id)
            spec.initial_weights = str(weights)
        for reference in spec.code:
            file = await self._files.here(reference, request.run_id)
            move_functions(spec.objective.section, Path(reference.path), file)
        return here

    def export_path(self, path: str) -> Path:
        """Return where the model is written."""
        return Path(path) if self._own is None else self._own / "model"

    def shelf(self, asked: CheckpointShelf) -> CheckpointShelf:
        """Return where checkpoints are written."""
        return asked if self._own is None else CheckpointShelf(self._own / "checkpoints")

    def forget_older(self, shelf: CheckpointShelf, name: str) -> None:
        """Keep one checkpoint besides the one that is to be made; the coordinator has fetched the others."""
        if self._own is None:
            return
        if name in shelf.names():
            shutil.rmtree(shelf.path / name)
        shelf.prune(1)

    @asynccontextmanager
    async def checkpoint(self, request: pb.LoadCheckpointRequest) -> AsyncIterator[Path]:
        """Give the folder of a checkpoint: in the run's directory, as this gang wrote it, or a copy for the while."""
        folder = await self._while_wanted(self._checkpoint(request), request.run_id)
        try:
            yield folder
        finally:
            self._files.release(folder)

    async def _checkpoint(self, request: pb.LoadCheckpointRequest) -> Path:
        folder = await self._checkpoint_here(request)
        await self._bring(folder, sealed=True, run_id=request.run_id)
        return folder

    async def _checkpoint_here(self, request: pb.LoadCheckpointRequest) -> Path:
        path = Path(request.path)
        if self._own is None or not request.HasField("folder"):
            return path
        mine = self._own / "checkpoints" / path.name
        try:
            if mine.is_dir() and FolderManifest.sealed(mine).digest == request.folder.digest:
                return mine
        except (FlotillaError, OSError) as error:
            logger.warning("the checkpoint of this host is not used", folder=str(mine), why=str(error))
        return await self._files.fetch(request.folder.digest, what=str(path), run_id=request.run_id)

    async def offered(self, path: Path, *, sealed: bool = False) -> FolderReference | None:
        """Return how the coordinator fetches what was written; None where it shares the folder."""
        return None if self._own is None else await self._files.offer_here(path, sealed=sealed)

    def _forget_other_runs(self, run_id: str) -> None:
        for other in self._place.glob("*"):
            if other.name != run_id:
                shutil.rmtree(other, ignore_errors=True)
