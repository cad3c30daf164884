"""When a run's state is saved, what of it is the coordinator's own part, and what follows from a save.

Invariants: at most one save is under way; the loop waits for its snapshot and for nothing else of it; a save that fails
is a warning and never the end of a run, and leaves `newest` as it was; one that fails for a full disk is told by
`full`, so that it can be made again before the run goes on; an update is called durable when each checkpoint
that is kept covers it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.trainers.learners import Learners, Stages, next_stage
from flotilla_core import telemetry
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.config import CheckpointConfig
from flotilla_core.disk import free_bytes
from flotilla_core.errors import Damaged, DiskFull, FlotillaError, Mismatch
from flotilla_core.telemetry import names
from flotilla_core.version import Version

FILE_NAME = "coordinator.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two steps: the coordinator's part of a checkpoint.

    Everything that the loop carries from one step to the next.
    """

    run_id: str
    steps_done: int
    version: Version
    cursor: dict[str, Any] | None
    """Where the next prompt comes from; None before the first step."""
    last_accuracy: float | None = None

    def to_bytes(self) -> bytes:
        """JSON, as it lies in a checkpoint."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Progress:
        """What `to_bytes` made."""
        try:
            values = json.loads(content)
            return cls(**{**values, "version": Version(*values["version"])})
        except (ValueError, KeyError, TypeError) as error:
            raise Mismatch(
                "the checkpoint was not made by a run that this Flotilla can continue",
                where=where,
                why=repr(error),
                next_step="start a new run with initial_weights set to its model folder",
            ) from error

    @classmethod
    def of(cls, checkpoint: Path) -> Progress:
        """The one inside a checkpoint."""
        path = checkpoint / FILE_NAME
        try:
            return cls.from_bytes(path.read_bytes(), str(path))
        except OSError as error:
            raise Damaged("the checkpoint is damaged", where=str(path), why=str(error)) from error


class RunCheckpoints:
    """The checkpoints of one run, from the loop's side."""

    def __init__(
        self,
        run_id: str,
        config: CheckpointConfig,
        learners: Learners,
        ledger: Ledger,
        shelf: CheckpointShelf,
        warn: Callable[[str], None],
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._learners = learners
        self._ledger = ledger
        self._warn = warn
        self._writing: asyncio.Task[None] | None = None
        self._measured: dict[str, float] = {}
        self.shelf = shelf
        self.newest = -1
        """Steps of the newest one that was made or loaded here, or is being written."""
        self.full: DiskFull | None = None
        """Why the disk did not take the last one."""
        self._nbytes = 0

    @property
    def wanted(self) -> bool:
        """Whether the run makes any."""
        return self._config.every_steps > 0

    @property
    def writing(self) -> bool:
        """Whether one is still on its way to the disk."""
        return self._writing is not None and not self._writing.done()

    def due(self, steps_done: int) -> bool:
        """Whether one belongs after so many steps."""
        return self.wanted and steps_done % self._config.every_steps == 0 and steps_done != self.newest

    def reconfigure(self, config: CheckpointConfig) -> None:
        """From the next one on."""
        self._config = config

    async def save(self, progress: Progress) -> None:
        """Return when the state is in the trainer's host memory; it reaches the disk behind the next steps."""
        await self.settle()
        self.full = None
        folder = self.shelf.path / CheckpointShelf.name_of(progress.steps_done)
        stages = self._learners.save(folder, progress.to_bytes())
        attributes: dict[str, str | int] = {names.RUN_ID: self._run_id, names.STEP: progress.steps_done}
        with telemetry.span(names.RL_CHECKPOINT, attributes=attributes):
            try:
                await next_stage(stages)
            except FlotillaError as error:
                await stages.aclose()
                self._refused(progress, error)
                return
        before, self.newest = self.newest, progress.steps_done
        self._writing = asyncio.create_task(
            self._follow(stages, progress, before), name=f"checkpoint {folder.name}"
        )

    async def save_whole(self, progress: Progress) -> None:
        """Return when it is on disk; raises where the disk does not take it."""
        await self.save(progress)
        await self.settle()
        if self.full is not None:
            raise self.full

    def may_fit(self) -> bool:
        """Whether another one as large as the last may find room."""
        return free_bytes(self.shelf.path) >= self._nbytes

    async def settle(self) -> None:
        """Wait for the one that is being written, if any."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                await writing
            finally:
                writing.cancel()

    async def close(self) -> None:
        """Follow no save any more; what the trainer writes it writes."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    def take_metrics(self) -> dict[str, float]:
        """What the writing of a checkpoint took, told once."""
        measured, self._measured = self._measured, {}
        return measured

    async def _follow(self, stages: Stages, progress: Progress, before: int) -> None:
        """Until the checkpoint is on disk, and what it replaces is gone."""
        try:
            async with aclosing(stages):
                durable = (await next_stage(stages)).durable
        except FlotillaError as error:
            self.newest = before
            self._refused(progress, error)
            return
        self._measured["checkpoint/write_s"] = durable.elapsed.ToNanoseconds() / 1e9
        self._measured["checkpoint/bytes"] = float(durable.bytes)
        self._nbytes = durable.bytes
        try:
            await asyncio.to_thread(self.shelf.prune, self._config.keep)
            oldest = await asyncio.to_thread(self._oldest)
            await self._ledger.covered(self._run_id, oldest.version, oldest.steps_done)
        except (FlotillaError, OSError) as error:
            self._refused(progress, error)

    def _oldest(self) -> Progress:
        return Progress.of(self.shelf.path / self.shelf.names()[0])

    def _refused(self, progress: Progress, error: Exception) -> None:
        if isinstance(error, DiskFull):
            self.full = error
            return
        self._warn(f"the checkpoint after step {progress.steps_done} failed, the run goes on: {error}")
