"""Takes an admitted run to its end, whether the built-in loop or a client makes its steps.

Invariants: exactly one terminal state is reached and recorded, by the coordinator that owns the ledger. Every part that
was opened is closed. A failure is one message that a user can act on, and its traceback goes to the log.

A run that lost the gang of its trainer, or another one, continues by itself. Only the loss of a session counts,
whichever call noticed it. The start that a user requested is attempted until the run has reached it. A run that loses
gangs repeatedly without making a step ends, with the reason of the last time. A run whose loop failed because of a full
disk, where nothing else waits for room, restarts after some time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from flotilla.common.v1.finding_pb2 import SEVERITY_WARNING, Finding
from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.run_fleet import RunFleet
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.report import conclude
from flotilla_coordinator.runs.active import RunHandle
from flotilla_coordinator.runs.client.loop import ClientLoop
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.disk_waits import TRY_AGAIN_S
from flotilla_coordinator.runs.loop import run_loop
from flotilla_coordinator.runs.resume import StartPoint, restore
from flotilla_coordinator.runs.wiring import RunWiring
from flotilla_coordinator.trainers.session import Gang
from flotilla_core import telemetry
from flotilla_core.errors import (
    DeadlineExceeded,
    DiskFull,
    Exhausted,
    FlotillaError,
    Internal,
    RankFailed,
    StaleVersion,
    Unavailable,
)
from flotilla_core.findings import info, text_of, warning
from flotilla_core.logger import get_logger
from flotilla_core.service import Host
from flotilla_core.telemetry import names
from flotilla_core.version import Version
from flotilla_trackers.follow import Trackers

log = get_logger(__name__)

MOST_IN_A_ROW = 3
NOT_THERE = (Unavailable, RankFailed, DeadlineExceeded)


@dataclass(frozen=True)
class RunExecutor:
    """One run, its services and its records."""

    host: Host
    fleet: RunFleet
    ledger: Ledger
    active: RunHandle
    directory: RunDirectory
    trackers: Trackers

    async def execute(self, start_point: StartPoint) -> None:
        """Take the run to its end; raise nothing but the cancellation of the coordinator itself."""
        active = self.active
        state, reason = run_pb2.RUN_STATE_FAILED, Finding()
        try:
            active.status.set_state(run_pb2.RUN_STATE_RUNNING)
            self.trackers.begin(active.run_id, self.directory.path, active.config, self._tracker_says)
            await self._run(start_point)
            stopped = active.control.stop_requested
            state = run_pb2.RUN_STATE_STOPPED if stopped else run_pb2.RUN_STATE_SUCCEEDED
            reason = active.stop_reason if stopped else Finding()
        except asyncio.CancelledError:
            state, reason = run_pb2.RUN_STATE_STOPPED, active.stop_reason
            if not active.control.stop_requested:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # the request has been met; what follows is the record
        except FlotillaError as error:
            reason = error.finding()
            if isinstance(error, DiskFull) and active.control.stop_requested:
                state, reason = run_pb2.RUN_STATE_STOPPED, active.stop_reason
            log.error("run failed", run_id=active.run_id, reason=text_of(reason), exc_info=True)
        except Exception as error:
            # This is the task boundary of a run: any other error is a defect, reported as the run's end.
            defect = Internal("internal error", why=repr(error), next_step="See `flotilla logs coordinator`.")
            reason = defect.finding()
            log.exception("run failed", run_id=active.run_id)
        finally:
            active.ending = True
            ours = not active.left and await self._is_ours()
            if active.context is not None:
                await _close(active.context, ours=ours)
            await self.fleet.close()
            if ours:
                await self._record_end(state, reason)
                self.trackers.end(
                    active.run_id, run_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower()
                )
            else:
                self.trackers.abandon(active.run_id)

    def _tracker_says(self, is_bad: bool, text: str) -> None:
        """Announce how a tracker of the run goes, while the run has watchers."""
        status = self.active.status
        if status.ended:
            log.info(text, run_id=self.active.run_id)
        else:
            status.notice(warning(text) if is_bad else info(text))

    async def _run(self, start_point: StartPoint) -> None:
        """Run the loop, again from the last checkpoint whenever a gang is lost."""
        active = self.active
        recovery = Recovery(self.fleet, self.ledger)
        while True:
            active.status.enter("waiting for services")
            wiring = RunWiring(
                self.host, self.fleet, self.ledger, active.run_id, active.control, active.status
            )
            fence = await self.ledger.begin(active.run_id, start_point.lineage)
            self.fleet.begin(fence)
            context, active.client = await wiring.build(self.directory, start_point.lineage, fence.number)
            active.context = context
            if active.client is not None:
                return await serve_client(active.client, start_point, active)
            try:
                return await run_loop(context, start_point)
            except FlotillaError as error:
                log.warning("the loop broke", run_id=active.run_id, error=str(error))
                start_point = await recovery.after(context, error, start_point)
            active.status.enter("recovering from the loss of a gang")
            await _close(context)
            active.context = None

    async def _is_ours(self) -> bool:
        """Return False once another coordinator has the run: its gangs and records are no longer for this one."""
        try:
            await self.ledger.beat()
        except StaleVersion as error:
            log.error("the run belongs to another coordinator", error=str(error))
            return False
        except FlotillaError as error:  # a full disk says nothing about the owner
            log.warning("the ledger was not written", error=str(error))
        return True

    async def _record_end(self, state: run_pb2.RunState.ValueType, reason: Finding) -> None:
        """Write the terminal state to every record, free the services for other runs, and let watchers end."""
        active = self.active
        active.context = None
        active.status.set_state(state, reason)
        if self.ledger.full is not None:
            active.events.close()  # watchers have the end; only its record waits for room on the disk
        try:
            ended_at = time.time()
            await self.ledger.drop_in_flight(active.run_id, DropReason.RUN_ENDED)
            try:
                # The ledger comes last: a coordinator that dies here leaves the rest to the next one.
                if notice := await self._concluded():
                    active.status.notice(info(notice))
            finally:
                await self.ledger.update_run(
                    active.run_id,
                    state=RunState(state),
                    reason=reason,
                    ended_at=ended_at,
                    step=active.status.run.step,
                    version=Version.from_proto(active.status.run.policy_version),
                )
        # No caller handles errors here, and a full disk must not leave watchers waiting for an end that never comes.
        except Exception:
            log.exception("the end of the run could not be recorded whole", run_id=active.run_id)
        finally:
            active.events.close()

    async def _concluded(self) -> str:
        """Return the answer of `conclude`, once the disk has room or the coordinator stops."""
        active = self.active
        while True:
            try:
                return await asyncio.to_thread(conclude, self.directory, active.status.run)
            except DiskFull:
                active.events.close()
                if active.abandoned:
                    raise
                await asyncio.sleep(TRY_AGAIN_S)


async def _close(context: RunContext, *, ours: bool = True) -> None:
    """Give back everything that is ours; a service that is gone has nothing to give back."""
    autoscaling = () if context.autoscaler is None else (context.autoscaler.close,)
    pinned = () if context.pinned is None else (context.pinned.close,)
    loop = (context.source.close, context.sync.end_check, context.checkpoints.close, context.lag.close)
    here = (*autoscaling, *pinned, *loop)
    elsewhere = (context.sync.close, *(session.close for session in context.learners.sessions))
    for close in (*here, *elsewhere) if ours else here:
        try:
            await close()
        except FlotillaError as error:
            log.warning("closing failed", run_id=context.run_id, error=str(error))
        # The record of the run must still be written, whatever fails here.
        except Exception:
            log.exception("closing failed", run_id=context.run_id)


async def serve_client(loop: ClientLoop, start_point: StartPoint, active: RunHandle) -> None:
    """Begin like the built-in loop, serve the client's calls, and end with the same outputs."""
    run = loop.run
    with telemetry.span(names.RL_LOOP, attributes={names.RUN_ID: run.run_id}):
        await restore(run, start_point)
        with run.phase("sync"):
            await run.sync.publish(run.policy.version)
            await run.sync.settled()
        active.opened.set()
        try:
            silence = await loop.serve()
        finally:
            await loop.close()
        if silence:
            active.request_stop(silence)
        await run.checkpoints.copied()
        if run.config.export_final:
            await run.export()


class Recovery:
    """Decides whether a run that lost gangs can restart, and counts the losses since it last got further."""

    def __init__(self, fleet: RunFleet, ledger: Ledger) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._furthest = -1
        self._in_row = 0

    async def after(self, run: RunContext, error: FlotillaError, start_point: StartPoint) -> StartPoint:
        """Return the point where the run restarts; raise `error` where no gang was lost."""
        if isinstance(error, DiskFull) and not run.stop_requested:
            await run.disk.wait(error)
            return await self._anew(run, start_point)
        lost = [] if run.stop_requested else await self._lost(run, error, start_point)
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
                f"a gang was lost {self._in_row} times, and the run got no further in between",
                where=f"run {run.run_id}, step {run.steps_done}",
                why=str(error),
                next_step=f"see `flotilla logs {lost[0].slot}`, then `flotilla run resume {run.run_id}`",
            ) from error
        before = f"{what}, the run waits for a gang and continues"
        run.status.notice(error.finding(before, SEVERITY_WARNING))
        for gang in lost:
            await self._fleet.gang_lost(gang.role, gang.instance_id, str(error))
        return await self._anew(run, start_point)

    async def _anew(self, run: RunContext, start_point: StartPoint) -> StartPoint:
        """Restart from the last checkpoint; a start that a user requested is kept until the run has reached it."""
        record = await self._ledger.get_run(run.run_id)
        lineage = record.version.lineage + 1
        return StartPoint(lineage) if run.begun else replace(start_point, lineage=lineage)

    async def _lost(self, run: RunContext, error: FlotillaError, start_point: StartPoint) -> list[Gang]:
        """Return the gangs whose sessions are gone."""
        learners = run.learners
        if learners.opened:
            return [session.gang for session in await learners.lost()]
        # A gang that was lost before, also while there was no coordinator, may take some time to return.
        if (self._in_row > 0 or start_point.after_coordinator) and isinstance(error, NOT_THERE):
            return [session.gang for session in learners.sessions if not session.opened]
        return []
