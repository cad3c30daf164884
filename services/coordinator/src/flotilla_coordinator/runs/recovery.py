"""A run that lost its trainer, or a gang beside it, goes on by itself.

Invariants: only the loss of a session counts, whichever call noticed it; what a user asked a run to begin with is
asked for until it has begun so; a run that loses a gang again and again without making a step ends, with the reason of
the last time. One whose loop ended for a full disk, which is where nothing else waits for room, begins again once a
while has passed.
"""

from __future__ import annotations

from dataclasses import replace

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.run_fleet import RunFleet
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.runs.beginning import Beginning
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.trainers.session import Gang
from flotilla_core.errors import DeadlineExceeded, DiskFull, Exhausted, FlotillaError, RankFailed, Unavailable

MOST_IN_A_ROW = 3
NOT_THERE = (Unavailable, RankFailed, DeadlineExceeded)


class Recovery:
    """Counts the losses of one run."""

    def __init__(self, fleet: RunFleet, ledger: Ledger) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._furthest = -1
        self._in_row = 0

    async def after(self, run: RunContext, error: FlotillaError, beginning: Beginning) -> Beginning:
        """How the run begins anew; raises `error` where no gang was lost."""
        if isinstance(error, DiskFull) and not run.stop_requested:
            await run.disk.wait(error)
            return await self._anew(run, beginning)
        lost = [] if run.stop_requested else await self._lost(run, error, beginning)
        if not lost:
            raise error
        what = (
            f"the {' and the '.join(gang.name for gang in lost)} {'was' if len(lost) == 1 else 'were'} lost"
        )
        if run.steps_done > self._furthest:
            self._furthest, self._in_row = run.steps_done, 0
        self._in_row += 1
        if self._in_row > MOST_IN_A_ROW:
            raise Exhausted(
                f"a gang was lost {self._in_row} times without a step in between",
                where=f"run {run.run_id}, step {run.steps_done}",
                why=str(error),
                next_step=f"see `flotilla logs {lost[0].slot}`, then `flotilla run resume {run.run_id}`",
            ) from error
        run.status.notice(run_pb2.NOTICE_LEVEL_WARNING, f"{what}, the run waits and goes on: {error}")
        for gang in lost:
            await self._fleet.gang_lost(gang.role, gang.instance_id, str(error))
        return await self._anew(run, beginning)

    async def _anew(self, run: RunContext, beginning: Beginning) -> Beginning:
        """From its last checkpoint; what a user asked it to begin with is asked for until it has begun so."""
        record = await self._ledger.get_run(run.run_id)
        lineage = record.version.lineage + 1
        return Beginning(lineage) if run.begun else replace(beginning, lineage=lineage)

    async def _lost(self, run: RunContext, error: FlotillaError, beginning: Beginning) -> list[Gang]:
        """The gangs whose sessions are gone."""
        learners = run.learners
        if learners.opened:
            return [session.gang for session in await learners.lost()]
        # One that was lost before, also while no coordinator was there, may take its time to come back.
        if (self._in_row > 0 or beginning.after_coordinator) and isinstance(error, NOT_THERE):
            return [session.gang for session in learners.sessions if not session.opened]
        return []
