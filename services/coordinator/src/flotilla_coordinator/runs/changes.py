"""Changes to a run: a pause, its end, other settings.

Invariants: a change is in the ledger and in the run directory before whoever asked for it hears of it, so a later
beginning of the run knows it; the run is told in the turn of the event loop in which it was seen to go on and in which
the ledger was asked, so nobody hears of a change that came too late for it; what would not start as a new run is
refused, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs.active import ActiveRun
from flotilla_coordinator.runs.live_settings import changed_config, differences
from flotilla_coordinator.runs.stored_run import stored_run
from flotilla_core.config import RunConfig, dump_yaml, load_text
from flotilla_core.errors import FailedPrecondition, FlotillaError


class RunChanges:
    """Says what a user wants of a run to the run, and records it."""

    def __init__(self, ledger: Ledger, planned: Callable[[RunConfig], Awaitable[run_pb2.Plan]]) -> None:
        self._ledger = ledger
        self._planned = planned

    async def pause(self, active: ActiveRun) -> None:
        """Begin no further step; a second pause changes nothing."""
        if active.control.paused:
            return
        active.control.pause()
        try:
            await self._ledger.update_run(active.run_id, state=RunState.PAUSED, stays=False)
        except FlotillaError:
            active.control.go_on()
            raise
        active.status.notice(run_pb2.NOTICE_LEVEL_INFO, "a pause after the current step was asked for")

    async def go_on(self, active: ActiveRun) -> None:
        """Take a pause back, unless the run is about to end: its end would be overwritten in the ledger."""
        if not _goes_on(active):
            raise FailedPrecondition(
                f"run {active.run_id} is being stopped, or ends by itself",
                next_step=f"resume it once it has ended: flotilla run resume {active.run_id}",
            )
        await self._ledger.update_run(active.run_id, state=RunState.RUNNING, stays=False)
        active.control.go_on()

    async def configure(
        self, record: RunRecord, active: ActiveRun | None, assignments: Sequence[str]
    ) -> None:
        """Go on by other settings; a run that ended early has them when it is resumed."""
        before = load_text(RunConfig, record.config_yaml, source=f"run {record.run_id}")
        config = changed_config(before, assignments, _steps_done(record, active))
        plan = await self._planned(config)
        # Meanwhile the run made steps, perhaps its last one.
        steps_done = _steps_done(record, active)
        config = changed_config(before, assignments, steps_done)
        if not (changes := differences(before, config)):
            return
        # Not in a thread: the loop must get no turn between that look and the ledger's queue.
        text = dump_yaml(config)
        RunDirectory(Path(record.directory)).write_change(steps_done, text, changes)
        if active is not None:
            active.control.configure(config)
        try:
            await self._ledger.update_run(record.run_id, config_yaml=text, stays=False)
        except FlotillaError:
            if active is not None:
                active.control.configure(before)
            raise
        if active is not None:
            for warning in plan.warnings:
                if any(key in warning for key in changes):
                    active.status.notice(run_pb2.NOTICE_LEVEL_WARNING, warning)


def changeable(record: RunRecord, active: ActiveRun | None) -> ActiveRun:
    """The handles of a run that goes on, and whose steps this coordinator makes."""
    if active is None or not _goes_on(active):
        raise FailedPrecondition(
            f"run {record.run_id} does not go on", next_step=f"see `flotilla run show {record.run_id}`"
        )
    if active.control.over:
        raise FailedPrecondition(
            f"run {record.run_id} has made its last step",
            why="what is left is its end: weights, evaluation, checkpoint, export",
            next_step="a new run goes on from its weights: set initial_weights to its folder `model`",
        )
    if active.config.loop == "client":
        raise FailedPrecondition(
            f"a client makes the steps of run {record.run_id}",
            why="it pauses by making none, and says with each call what it wants of it",
            next_step="change it where the client runs",
        )
    return active


def _goes_on(active: ActiveRun) -> bool:
    """Whether no end has begun or was asked for."""
    return not (active.control.stop_requested or active.ending or active.status.ended)


def _steps_done(record: RunRecord, active: ActiveRun | None) -> int:
    """Of a run that takes other settings; raises where it takes none."""
    if record.state.resumable and active is None:
        return stored_run(record).step
    return changeable(record, active).status.run.step
