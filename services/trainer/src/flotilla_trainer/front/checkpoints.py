"""Save and load checkpoints: the ranks copy and write them, the front seals and verifies them.

Invariants: at most one checkpoint is being written; no update waits for more than its snapshot; a later failure costs
only this checkpoint, and leaves no folder behind; a load verifies every byte before it sends the ranks a command. This
process reads files on separate threads, so that it can always answer. A save gives a sealed folder that is complete by
itself, whatever the role of the gang; it may be moved into another one afterwards, and can be loaded from any place.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.checkpoint import CheckpointShelf, Manifest, on_disk
from flotilla_core.disk import folder_bytes
from flotilla_core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
    Unavailable,
)
from flotilla_core.logger import get_logger
from flotilla_core.service import Activities
from flotilla_core.version import Version
from flotilla_trainer.front.model_shape import check_shape, model_shape
from flotilla_trainer.front.session import Session
from flotilla_trainer.front.session_files import SessionFiles
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.wire.frames import Frame

TRAINER_FILE = "trainer.json"
COORDINATOR_FILE = "coordinator.json"
NUMBER_BITS = 48
"""The size of the random number of a report; numbers are random so that a new gang cannot answer for a lost one."""

Reports = list[asyncio.Future[Frame]]
logger = get_logger()


@dataclass(frozen=True)
class Save:
    """A checkpoint whose state is in host memory; `durable` ends when it is sealed, or raises why it cannot be."""

    stall_s: float
    durable: asyncio.Task[pb.CheckpointDurable]


class Checkpoints:
    """Saves and loads checkpoints for the open session."""

    def __init__(self, gang: Gang, booted: Path, activities: Activities, files: SessionFiles) -> None:
        self._files = files
        self._gang = gang
        self._booted = booted
        self._activities = activities
        self._busy = ""
        self._writing: asyncio.Task[pb.CheckpointDurable] | None = None
        self._publishing = False

    async def begin(self, session: Session, request: pb.SaveCheckpointRequest) -> Save:
        """Copy the state of the session to host memory; a task then writes the checkpoint."""
        shelf, name = _place(request.path)
        if self._busy:
            raise FailedPrecondition(
                f"checkpoint {self._busy} is still being written", next_step="save again when it is durable"
            )
        self._busy = name
        shelf = self._files.shelf(shelf)
        try:
            await asyncio.to_thread(self._files.forget_older, shelf, name)
            folder = await asyncio.to_thread(on_disk, shelf.path / name, shelf.begin, name)
            started = time.monotonic()
            async with session.holding(Version.from_proto(request.policy_version), "the checkpoint"):
                contents = {
                    TRAINER_FILE: json.dumps(self._facts(session), indent=1).encode(),
                    COORDINATOR_FILE: request.coordinator_state,
                }
                reports = await self._snapshot(session, folder)
            stall_s = time.monotonic() - started
            self._writing = asyncio.create_task(
                self._write(session, shelf, name, reports, contents), name=f"checkpoint {name}"
            )
            self._writing.add_done_callback(self._ended)
            return Save(stall_s, self._writing)
        finally:
            if self._writing is None:
                shelf.discard(name)
                self._busy = ""

    async def load(self, session: Session, request: pb.LoadCheckpointRequest) -> pb.LoadCheckpointResponse:
        """Return the session to a sealed checkpoint; nothing changes unless all of it is intact and fits."""
        async with (
            session.holding(session.version, "the load"),
            self._files.checkpoint(request) as folder,
        ):
            with self._activities.doing(f"verifying checkpoint {folder.name}", run_id=session.run_id):
                await asyncio.to_thread(Manifest.verified, folder)
                facts = json.loads(await asyncio.to_thread((folder / TRAINER_FILE).read_bytes))
                state = await asyncio.to_thread((folder / COORDINATOR_FILE).read_bytes)
            check_shape(facts["model_shape"], folder, self._booted)
            fields = {"folder": str(folder), "fresh_optimizer": request.fresh_optimizer}
            with self._activities.doing(f"loading checkpoint {folder.name}", run_id=session.run_id):
                await self._gang.command("load_checkpoint", fields, limit_s=self._gang.slow_timeout_s)
            session.continue_from(facts, fresh_objective=request.fresh_objective)
        return pb.LoadCheckpointResponse(policy_version=session.version.to_proto(), coordinator_state=state)

    def give_up(self) -> None:
        """Stop writing the checkpoint; one that is already being published is finished."""
        if self._writing is not None and not self._publishing:
            self._writing.cancel()

    async def abandon(self) -> None:
        """Stop writing the checkpoint, and wait until the writer has ended."""
        self.give_up()
        if self._writing is not None:
            await asyncio.wait({self._writing})

    def _facts(self, session: Session) -> dict[str, Any]:
        return session.facts() | {
            "ranks": self._gang.size,
            "parameters": self._gang.facts["parameters"],
            "model_shape": model_shape(self._booted),
        }

    async def _snapshot(self, session: Session, folder: Path) -> Reports:
        number = secrets.randbits(NUMBER_BITS)
        reports = self._gang.reports(number)
        fields = {"folder": str(folder), "report": number}
        try:
            with self._activities.doing("copying the state for a checkpoint", run_id=session.run_id):
                await self._gang.command("snapshot", fields, limit_s=self._gang.slow_timeout_s)
            session.ranks.check_open()
        except FlotillaError:
            _forget(reports)
            raise
        return reports

    async def _write(
        self,
        session: Session,
        shelf: CheckpointShelf,
        name: str,
        reports: Reports,
        contents: dict[str, bytes],
    ) -> pb.CheckpointDurable:
        started = time.monotonic()
        folder = shelf.aside(name)
        try:
            with self._activities.doing(f"writing checkpoint {name}", run_id=session.run_id):
                await self._written(reports, folder)
                await self._gang.collect(folder)
                manifest = await asyncio.to_thread(on_disk, folder, _seal, folder, contents)
                self._publishing = True
                path = await asyncio.to_thread(on_disk, folder, shelf.publish, name)
        finally:
            _forget(reports)
            await asyncio.to_thread(shelf.discard, name)
        offered = await self._files.offered(path, sealed=True)
        durable = pb.CheckpointDurable(path=str(path), bytes=manifest.nbytes, folder=offered)
        durable.elapsed.FromNanoseconds(int((time.monotonic() - started) * 1e9))
        return durable

    async def _written(self, reports: Reports, folder: Path) -> None:
        """Wait until every rank has written its files or failed."""
        if not reports:
            raise Unavailable("the trainer's ranks are being restarted")
        limit_s, nbytes = self._gang.slow_timeout_s, -1
        pending = set(reports)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=limit_s)
            before, nbytes = nbytes, await asyncio.to_thread(folder_bytes, folder)
            if pending and nbytes == before:
                raise DeadlineExceeded(
                    "the checkpoint cannot be written",
                    where=str(folder),
                    why=f"nothing was added to its {nbytes} bytes for {limit_s:g} s",
                    next_step="check whether the disk is full or hangs",
                )
        for report in reports:
            report.result()

    def _ended(self, task: asyncio.Task[pb.CheckpointDurable]) -> None:
        self._writing, self._busy, self._publishing = None, "", False
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a checkpoint was not written", error=str(error))


def _place(path: str) -> tuple[CheckpointShelf, str]:
    folder = Path(path)
    if not path or not folder.is_absolute():
        raise InvalidRequest("the path is not absolute", where=f"path {path!r}")
    CheckpointShelf.step_of(folder.name)
    return CheckpointShelf(folder.parent), folder.name


def _seal(folder: Path, contents: dict[str, bytes]) -> Manifest:
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return Manifest.seal(folder)


def _forget(reports: Reports) -> None:
    for report in reports:
        report.cancel()
