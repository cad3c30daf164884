"""From an admitted run to its end, whatever the end is and whoever makes its steps: the built-in loop or a client.

Invariants: exactly one terminal state is reached and recorded, by the coordinator that owns the ledger; every
collaborator that was opened is closed; a failure is one message that a user can act on, and its traceback goes to the
log.

A run that lost its trainer, or a gang beside it, goes on by itself. Only the loss of a session counts, whichever call
noticed it; what a user asked a run to begin with is asked for until it has begun so; a run that loses a gang again and
again without making a step ends, with the reason of the last time. One whose loop ended for a full disk, which is where
nothing else waits for room, begins again once a while has passed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import structlog

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
    RankFailed,
    StaleVersion,
    Unavailable,
)
from flotilla_core.service import Host
from flotilla_core.telemetry import names
from flotilla_core.version import Version

log = structlog.get_logger(__name__)

MOST_IN_A_ROW = 3
NOT_THERE = (Unavailable, RankFailed, DeadlineExceeded)


@dataclass(frozen=True)
class RunExecutor:
    """One run, the services that it has, and where it is recorded."""

    host: Host
    fleet: RunFleet
    ledger: Ledger
    active: RunHandle
    directory: RunDirectory

    async def execute(self, start_point: StartPoint) -> None:
        """Go on to the end; never raises but for cancellation of the coordinator itself."""
        active = self.active
        state, reason = run_pb2.RUN_STATE_FAILED, ""
        try:
            active.status.set_state(run_pb2.RUN_STATE_RUNNING)
            await self._run(start_point)
            stopped = active.control.stop_requested
            state = run_pb2.RUN_STATE_STOPPED if stopped else run_pb2.RUN_STATE_SUCCEEDED
            reason = active.stop_reason if stopped else ""
        except asyncio.CancelledError:
            state, reason = run_pb2.RUN_STATE_STOPPED, active.stop_reason or "the coordinator was stopped"
            if not active.control.stop_requested:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # the request has been met; what follows is the record
        except FlotillaError as error:
            reason = str(error)
            if isinstance(error, DiskFull) and active.control.stop_requested:
                state, reason = run_pb2.RUN_STATE_STOPPED, active.stop_reason
            log.error("run failed", run_id=active.run_id, reason=reason, exc_info=True)
        except Exception as error:
            # The task boundary of a run: anything else is a defect, reported as the run's end.
            reason = f"internal error: {error!r}; see the coordinator's log"
            log.exception("run failed", run_id=active.run_id)
        finally:
            active.ending = True
            ours = await self._is_ours()
            if active.context is not None:
                await _close(active.context, ours=ours)
            await self.fleet.close()
            if ours:
                await self._record_end(state, reason)

    async def _run(self, start_point: StartPoint) -> None:
        """The loop, begun again from its last checkpoint whenever a gang is lost under it."""
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
        """False once another coordinator goes on with the run: gangs and records are not for this one any more."""
        try:
            await self.ledger.beat()
        except StaleVersion as error:
            log.error("the run belongs to another coordinator", error=str(error))
            return False
        except FlotillaError as error:  # a full disk says nothing about the owner
            log.warning("the ledger was not written", error=str(error))
        return True

    async def _record_end(self, state: run_pb2.RunState.ValueType, reason: str) -> None:
        """The terminal state in every record; its services are free for other runs, and watchers are let go."""
        active = self.active
        active.context = None
        active.status.set_state(state, reason)
        if self.ledger.full is not None:
            active.events.close()  # the end is told; only its record waits for room on the disk
        try:
            await self.ledger.drop_in_flight(active.run_id, DropReason.RUN_ENDED)
            await self.ledger.update_run(
                active.run_id,
                state=RunState(state),
                reason=reason,
                ended_at=time.time(),
                step=active.status.run.step,
                version=Version.from_proto(active.status.run.policy_version),
            )
            notice = await self._concluded()
            if notice:
                active.status.notice(run_pb2.NOTICE_LEVEL_INFO, notice)
        # Nobody is above: a full disk must not leave watchers waiting for an end that never comes.
        except Exception:
            log.exception("the end of the run could not be recorded whole", run_id=active.run_id)
        finally:
            active.events.close()

    async def _concluded(self) -> str:
        """What `conclude` says, once the disk takes it, or the coordinator goes."""
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
    """Give everything back that is ours; a service that is gone has nothing to give back."""
    autoscaling = () if context.autoscaler is None else (context.autoscaler.close,)
    pinned = () if context.pinned is None else (context.pinned.close,)
    here = (*autoscaling, *pinned, context.source.close, context.checkpoints.close, context.lag.close)
    elsewhere = (context.sync.close, *(session.close for session in context.learners.sessions))
    for close in (*here, *elsewhere) if ours else here:
        try:
            await close()
        except FlotillaError as error:
            log.warning("closing failed", run_id=context.run_id, error=str(error))
        # The record of the run is still to be written, whatever went wrong here.
        except Exception:
            log.exception("closing failed", run_id=context.run_id)


async def serve_client(loop: ClientLoop, start_point: StartPoint, active: RunHandle) -> None:
    """Begin as the built-in loop does, take the client's calls, and leave what such a run leaves."""
    run = loop.run
    with telemetry.span(names.RL_LOOP, attributes={names.RUN_ID: run.run_id}):
        await restore(run, start_point)
        with run.phase("sync"):
            await run.sync.publish(run.policy.version)
        active.opened.set()
        try:
            silence = await loop.serve()
        finally:
            await loop.close()
        if silence:
            active.request_stop(silence)
        if run.config.export_final:
            await run.export()


class Recovery:
    """A run that lost its trainer, or a gang beside it, goes on by itself.

    Counts the losses of one run.
    """

    def __init__(self, fleet: RunFleet, ledger: Ledger) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._furthest = -1
        self._in_row = 0

    async def after(self, run: RunContext, error: FlotillaError, start_point: StartPoint) -> StartPoint:
        """How the run begins anew; raises `error` where no gang was lost."""
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
                f"a gang was lost {self._in_row} times without a step in between",
                where=f"run {run.run_id}, step {run.steps_done}",
                why=str(error),
                next_step=f"see `flotilla logs {lost[0].slot}`, then `flotilla run resume {run.run_id}`",
            ) from error
        run.status.notice(run_pb2.NOTICE_LEVEL_WARNING, f"{what}, the run waits and goes on: {error}")
        for gang in lost:
            await self._fleet.gang_lost(gang.role, gang.instance_id, str(error))
        return await self._anew(run, start_point)

    async def _anew(self, run: RunContext, start_point: StartPoint) -> StartPoint:
        """From its last checkpoint; what a user asked it to begin with is asked for until it has begun so."""
        record = await self._ledger.get_run(run.run_id)
        lineage = record.version.lineage + 1
        return StartPoint(lineage) if run.begun else replace(start_point, lineage=lineage)

    async def _lost(self, run: RunContext, error: FlotillaError, start_point: StartPoint) -> list[Gang]:
        """The gangs whose sessions are gone."""
        learners = run.learners
        if learners.opened:
            return [session.gang for session in await learners.lost()]
        # One that was lost before, also while no coordinator was there, may take its time to come back.
        if (self._in_row > 0 or start_point.after_coordinator) and isinstance(error, NOT_THERE):
            return [session.gang for session in learners.sessions if not session.opened]
        return []
