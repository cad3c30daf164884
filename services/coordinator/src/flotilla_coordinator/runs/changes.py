"""Changes to a run: a pause, its end, other settings.

Invariants: a change is in the ledger and in the run directory before whoever asked for it hears of it, so a later
beginning of the run knows it; what would not start as a new run is refused, and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.rundir import RunDirectory
from flotilla_coordinator.runs.active import ActiveRun
from flotilla_coordinator.runs.live_settings import changed_config, differences
from flotilla_core.config import RunConfig, dump_yaml, load_text
from flotilla_core.errors import FailedPrecondition


class RunChanges:
    """Records what a user wants of a run, then says it to the run."""

    def __init__(self, ledger: Ledger, planned: Callable[[RunConfig], Awaitable[object]]) -> None:
        self._ledger = ledger
        self._planned = planned

    async def pause(self, active: ActiveRun) -> None:
        """Begin no further step; a second pause changes nothing."""
        if active.control.paused:
            return
        await self._ledger.update_run(active.run_id, state=RunState.PAUSED)
        active.control.pause()
        active.status.notice(run_pb2.NOTICE_LEVEL_INFO, "a pause after the current step was asked for")

    async def go_on(self, active: ActiveRun) -> None:
        """Take a pause back."""
        await self._ledger.update_run(active.run_id, state=RunState.RUNNING)
        active.control.go_on()

    async def configure(self, record: RunRecord, steps_done: int, assignments: Sequence[str]) -> RunConfig:
        """The changed configuration, once every record that a later beginning reads has it."""
        before = load_text(RunConfig, record.config_yaml, source=f"run {record.run_id}")
        config = changed_config(before, assignments, steps_done)
        await self._planned(config)
        if changes := differences(before, config):
            text, directory = dump_yaml(config), RunDirectory(Path(record.directory))
            await asyncio.to_thread(directory.write_change, steps_done, text, changes)
            await self._ledger.update_run(record.run_id, config_yaml=text)
        return config


def changeable(record: RunRecord, active: ActiveRun | None) -> ActiveRun:
    """The handles of a run that goes on, and whose steps this coordinator makes."""
    if active is None or active.status.ended or active.control.stop_requested:
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
