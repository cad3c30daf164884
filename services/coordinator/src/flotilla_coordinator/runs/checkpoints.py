"""Saves the checkpoints of a run when they are due, with the coordinator's own part of its state.

Invariants: at most one save is under way; the loop waits for its snapshot in memory only. A save that fails is a
warning, never the end of a run, and leaves `newest` unchanged. A save that fails because of a full disk sets `full`, so
that it can be repeated before training continues. An update is called durable when every checkpoint that is kept covers
it. With `best_by` the checkpoint whose evaluation was best stays, and so does one whose evaluation is still under way;
of equal ones the first is best.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.trainers.learners import Learners, Stages, next_stage
from flotilla_core import telemetry
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.config import CheckpointConfig
from flotilla_core.disk import free_bytes
from flotilla_core.errors import Cancelled, Damaged, DiskFull, FlotillaError, Mismatch, NotFound
from flotilla_core.logger import get_logger
from flotilla_core.telemetry import names
from flotilla_core.transfer.object_store import ObjectFolder
from flotilla_core.version import Version

log = get_logger(__name__)

FILE_NAME = "coordinator.json"
CONFIGURATION = "run.yaml"
"""The file beside the copies of checkpoints with the configuration of their run."""
BEST = "best"
"""The name by which users call the best checkpoint."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run between two steps: the coordinator's part of a checkpoint."""

    run_id: str
    steps_done: int
    version: Version
    cursor: dict[str, Any] | None
    """The place of the next prompt; None before the first step."""
    last_accuracy: float | None = None
    fresh_optimizer: bool = False
    """True where the moments beside it do not count, as a fork's that begins without them."""
    fresh_objective: bool = False
    """True where what the objective adapted and remembered does not count."""

    def to_bytes(self) -> bytes:
        """Return the progress as JSON, the form in which a checkpoint holds it."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Progress:
        """Read what `to_bytes` wrote."""
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
        """Read the progress inside a checkpoint."""
        path = checkpoint / FILE_NAME
        try:
            return cls.from_bytes(path.read_bytes(), str(path))
        except OSError as error:
            raise Damaged("the checkpoint is damaged", where=str(path), why=str(error)) from error


def best_step(values: Mapping[int, float], steps: Collection[int]) -> int | None:
    """Return the first of the steps whose evaluation is best; None where none of them was evaluated."""
    evaluated = sorted(step for step in steps if step in values)
    return max(evaluated, key=lambda step: values[step], default=None)


def best_checkpoint(directory: RunDirectory, best_by: str) -> str:
    """Return the name of the best checkpoint of a run; empty where none is to be kept, or none has an evaluation."""
    shelf = CheckpointShelf(directory.checkpoints_path)
    steps = [shelf.step_of(name) for name in shelf.names()]
    step = best_step(directory.evaluated(best_by), steps) if best_by else None
    return "" if step is None else shelf.name_of(step)


def named_best(directory: RunDirectory, best_by: str) -> str:
    """Return the same for a user who asks for `best`."""
    name = best_checkpoint(directory, best_by)
    if name:
        return name
    raise NotFound(
        "the run has no best checkpoint",
        where=str(directory.checkpoints_path),
        why=f"no checkpoint has an evaluation with {best_by}" if best_by else "checkpoint.best_by is empty",
        next_step="name another one: `flotilla checkpoint list`",
    )


class RunCheckpoints:
    """The checkpoints of one run, as the loop uses them."""

    def __init__(
        self,
        run_id: str,
        config: CheckpointConfig,
        learners: Learners,
        *,
        ledger: Ledger,
        shelf: CheckpointShelf,
        warn: Callable[[str], None],
        evaluated: Callable[[str], Mapping[int, float]] = lambda _: {},
        awaited: Callable[[], int | None] = lambda: None,
        configuration: Callable[[], str] = lambda: "",
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._learners = learners
        self._ledger = ledger
        self._warn = warn
        self._evaluated = evaluated
        self._copies = CheckpointCopies(run_id, config.copy_to, shelf, configuration, warn)
        self._awaited = awaited
        """The steps done at the evaluation whose result is not there yet."""
        self._writing: asyncio.Task[None] | None = None
        self._measured: dict[str, float] = {}
        self.shelf = shelf
        self.newest = -1
        """Steps done in the newest checkpoint that was saved or loaded here, or is being written."""
        self.full: DiskFull | None = None
        """The error of the last save, where the disk was full."""
        self._nbytes = 0

    @property
    def wanted(self) -> bool:
        """Return whether the run saves checkpoints."""
        return self._config.every_steps > 0

    @property
    def writing(self) -> bool:
        """Return whether a checkpoint is still being written to the disk."""
        return self._writing is not None and not self._writing.done()

    def due(self, steps_done: int) -> bool:
        """Return whether a checkpoint is due after so many steps."""
        return self.wanted and steps_done % self._config.every_steps == 0 and steps_done != self.newest

    async def best_due(self, steps_done: int) -> bool:
        """Return whether the evaluation after so many steps found a new best, or may still do so."""
        best_by = self._config.best_by
        if not best_by or not self.wanted or steps_done == self.newest:
            return False
        if self._awaited() == steps_done:
            return True
        values = await asyncio.to_thread(self._evaluated, best_by)
        return best_step(values, {*self._steps(), steps_done}) == steps_done

    def reconfigure(self, config: CheckpointConfig) -> None:
        """Use another schedule from the next checkpoint on."""
        self._config = config

    async def save(self, progress: Progress) -> None:
        """Return when the state is in the trainer's host memory; it is written to disk during the next steps."""
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
        """Return when the checkpoint is on disk; raise where the disk is full."""
        await self.save(progress)
        await self.settle()
        if self.full is not None:
            raise self.full

    def may_fit(self) -> bool:
        """Return whether the disk has room for another checkpoint as large as the last."""
        return free_bytes(self.shelf.path) >= self._nbytes

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                await writing
            finally:
                writing.cancel()

    @property
    def copying(self) -> bool:
        """Return whether a checkpoint is still being copied to object storage."""
        return self._copies.step is not None

    async def copied(self) -> None:
        """Wait until what is durable is copied to object storage, where the run wants that."""
        await self._copies.settle()

    async def close(self) -> None:
        """Stop following a save, which the trainer completes by itself, and end a copy."""
        await self._copies.close()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    def take_metrics(self) -> dict[str, float]:
        """Return the measurements of the last save, once."""
        measured, self._measured = self._measured, {}
        return measured

    async def _follow(self, stages: Stages, progress: Progress, before: int) -> None:
        """Wait until the checkpoint is on disk, and the one that it replaces is removed."""
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
        self._copies.take(progress.steps_done)
        try:
            await asyncio.to_thread(self._prune)
            oldest = await asyncio.to_thread(self._oldest)
            await self._ledger.covered(self._run_id, oldest.version, oldest.steps_done)
        except (FlotillaError, OSError) as error:
            self._refused(progress, error)

    def _steps(self) -> list[int]:
        return [self.shelf.step_of(name) for name in self.shelf.names()]

    def _prune(self) -> None:
        best_by = self._config.best_by
        best = best_step(self._evaluated(best_by), self._steps()) if best_by else None
        awaited = self._awaited() if best_by else None
        besides = (best, awaited, self._copies.step)
        self.shelf.prune(self._config.keep, [step for step in besides if step is not None])

    def _oldest(self) -> Progress:
        return Progress.of(self.shelf.path / self.shelf.names()[0])

    def _refused(self, progress: Progress, error: Exception) -> None:
        if isinstance(error, DiskFull):
            self.full = error
            return
        self._warn(f"the checkpoint after step {progress.steps_done} failed, and the run continues: {error}")


class CheckpointCopies:
    """Copies checkpoints of a run to object storage in the background: the newest, when it is durable."""

    def __init__(
        self,
        run_id: str,
        copy_to: str,
        shelf: CheckpointShelf,
        configuration: Callable[[], str],
        warn: Callable[[str], None],
    ) -> None:
        self._place = f"{copy_to}/{run_id}" if copy_to else ""
        self._shelf = shelf
        self._configuration = configuration
        self._warn = warn
        self._owed: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()
        self.step: int | None = None
        """The steps done at the checkpoint that is being copied, which must stay meanwhile."""

    def take(self, steps_done: int) -> None:
        """Copy this checkpoint when the one that is being copied is done; one that still waits is left out."""
        if self._place:
            self._owed = steps_done
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._copy_all(), name="copy checkpoints")

    async def settle(self) -> None:
        """Wait until nothing is left to copy."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """End the copy that is under way; without its manifest it counts for nothing."""
        self._owed = None
        self._stopped.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _copy_all(self) -> None:
        while self._owed is not None:
            self.step, self._owed = self._owed, None
            name = self._shelf.name_of(self.step)
            try:
                await asyncio.to_thread(self._copy, name)
            except Cancelled:
                log.info("a copy was ended", checkpoint=name, place=self._place)
            except (FlotillaError, OSError) as error:
                self._warn(f"checkpoint {name} was not copied, and the run continues: {error}")
            else:
                log.info("copied", checkpoint=name, place=self._place)
            self.step = None

    def _copy(self, name: str) -> None:
        ObjectFolder(self._place).write(CONFIGURATION, self._configuration().encode())
        ObjectFolder(f"{self._place}/{name}").take_copy(self._shelf.folder(name), self._stopped)
