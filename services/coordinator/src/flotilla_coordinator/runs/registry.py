"""Manages all runs of this coordinator: start, lookup, stop, pause and other settings.

Invariants: starts and changes exclude each other, and a repeated request acts once. A request is completed even when
its caller goes away, so that no run is in the ledger without a task. Before any call is answered, a run that an earlier
coordinator left unfinished is continued or closed.

A change is in the ledger and in the run directory before its caller gets an answer, so a restart of the run includes
it. One turn of the event loop finds the run active, asks the ledger and gives the run the change. So no caller learns
of a change that came too late. Settings with which no new run would start are refused, and change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR, Registration
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.fleet import Fleet
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.plan import plan_run
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs.active import RunHandle
from flotilla_coordinator.runs.control import changed_config, differences
from flotilla_coordinator.runs.start import RunStarter
from flotilla_coordinator.views.runs import stored_run
from flotilla_core.bus import EventStream
from flotilla_core.config import RunConfig, dump_yaml, load_text
from flotilla_core.config.model import is_url
from flotilla_core.errors import DiskFull, FailedPrecondition, FlotillaError
from flotilla_core.findings import info, warning
from flotilla_core.logger import get_logger
from flotilla_core.service import Host
from flotilla_core.tasks import BackgroundTasks

log = get_logger(__name__)

STOP_GRACE_S = 60.0
LIST_LIMIT = 100
WORK_STATES = {
    "ready": pb.WORK_STATE_READY,
    "ejected": pb.WORK_STATE_EJECTED,
    "draining": pb.WORK_STATE_DRAINING,
}


class Runs:
    """Starts runs, and finds every run in the ledger."""

    def __init__(self, host: Host, fleet: Fleet, ledger: Ledger, events: EventStream) -> None:
        self.host = host
        self.ledger = ledger
        self.events = events
        self._fleet = fleet
        self._starter = RunStarter(host, fleet, ledger, events)
        self._active: dict[str, RunHandle] = {}
        """The active runs by id."""
        self._started: dict[str, str] = {}
        self.change_lock = asyncio.Lock()
        """No run starts, is resumed or changes while another task holds this lock."""
        self._adopting = asyncio.Lock()
        self._calls = BackgroundTasks()
        self._recovered = asyncio.Event()

    async def recover(self) -> None:
        """Continue or close the runs that an earlier coordinator left unfinished, before any call is answered."""
        self.ledger.watch_disk(self._disk_changed)
        async with self.change_lock:
            # The earlier of two runs comes first.
            for active in await self._starter.take_over(await self.ledger.unfinished_runs()):
                self._register(active)
        self._recovered.set()

    def plan(self, config_yaml: str) -> run_pb2.Plan:
        """Return the plan of a run: its figures, its warnings and the reasons against it."""
        return plan_run(load_text(RunConfig, config_yaml, source="run"), self.host.stack)

    async def start(self, config_yaml: str, request_id: str, fork: pb.Fork | None = None) -> run_pb2.Run:
        """Admit a run, or raise the reason against it; a repeated request gets the run that it started."""
        await self._recovered.wait()

        async def act() -> run_pb2.Run:
            async with self.change_lock:
                if request_id and request_id in self._started:
                    return await self.find(self._started[request_id])
                if fork is None:
                    active = await self._starter.start(config_yaml)
                else:
                    source = await self.ledger.get_run(fork.run_id)
                    active = await self._starter.fork(
                        config_yaml, source, fork.checkpoint, fresh=fork.fresh_optimizer
                    )
                run = self._register(active)
                self._started[request_id] = run.run_id
                return run

        return await self._calls.shielded(act())

    async def resume(self, run_id: str, checkpoint: str, request_id: str) -> run_pb2.Run:
        """Continue a run that ended early, or raise the reason against it; a repeated request acts once.

        A place in object storage stands for a run of another host, which is brought here first.
        """
        await self._recovered.wait()

        if is_url(run_id):
            return await self._calls.shielded(self._resume_from(run_id, request_id))

        async def act() -> run_pb2.Run:
            async with self.change_lock:
                if request_id and request_id in self._started:
                    return await self.find(self._started[request_id])
                record = await self.ledger.get_run(run_id)
                active = self._active.get(record.run_id)
                held = active is not None and (active.control.paused or active.status.waits_for_disk)
                if active is not None and held and not checkpoint:
                    if active.control.paused:
                        await self._unpause(active)
                    await self._try_disk(active)
                    run = active.status.run
                else:
                    self._refuse_active(active)
                    run = self._register(await self._starter.resume(record, checkpoint))
                self._started[request_id] = run.run_id
                return run

        return await self._calls.shielded(act())

    async def _resume_from(self, place: str, request_id: str) -> run_pb2.Run:
        async with self._adopting:
            if request_id and request_id in self._started:
                return await self.find(self._started[request_id])
            return await self.resume(await self._starter.adopt(place), "", request_id)

    async def pause(self, run_id: str) -> run_pb2.Run:
        """Let an active run begin no further step."""
        await self._recovered.wait()

        async def act() -> run_pb2.Run:
            async with self.change_lock:
                record = await self.ledger.get_run(run_id)
                active = self._active.get(record.run_id)
                await self._pause(changeable(record, active))
                return await self.find(record.run_id)

        return await self._calls.shielded(act())

    async def configure(self, run_id: str, assignments: Sequence[str]) -> run_pb2.Run:
        """Change settings of a run; a run that ended early gets them when it is resumed."""
        await self._recovered.wait()

        async def act() -> run_pb2.Run:
            async with self.change_lock:
                record = await self.ledger.get_run(run_id)
                active = self._active.get(record.run_id)
                await self._configure(record, active, assignments)
                return await self.find(record.run_id)

        return await self._calls.shielded(act())

    async def stop(self, run_id: str, reason: str) -> run_pb2.Run:
        """End a run after its current step; after a grace period, at once."""
        found = await self.find(run_id)

        async def act() -> run_pb2.Run:
            active = self._active.get(found.run_id)
            if active is None or active.status.ended:
                raise FailedPrecondition(
                    f"run {found.run_id} has ended already",
                    next_step=f"see `flotilla run show {found.run_id}`",
                )
            # This is one turn of the event loop, up to the ledger's queue: a concurrent end of a pause either sees the
            # stop or is before it in the queue, and the end of the run is behind it.
            active.request_stop(reason)
            active.status.set_state(run_pb2.RUN_STATE_STOPPING, active.stop_reason)
            asyncio.get_running_loop().call_later(STOP_GRACE_S, active.cancel)
            await self.ledger.stopping(found.run_id, active.stop_reason)
            return active.status.run

        return await self._calls.shielded(act())

    def _register(self, active: RunHandle) -> run_pb2.Run:
        """Keep a run whose task has begun, until that task ends."""
        assert active.task is not None, "it works"
        self._active[active.run_id] = active
        # An ended run is read from its records: only active runs are in memory.
        active.task.add_done_callback(lambda _: self._active.pop(active.run_id, None))
        return active.status.run

    def _refuse_active(self, active: RunHandle | None) -> None:
        """Raise where a run that should be resumed has not ended, or its end is not recorded yet."""
        if active is None:
            return
        if active.status.ended and self.ledger.full is not None:
            raise self.ledger.full
        raise FailedPrecondition(
            f"run {active.run_id} has not ended",
            why="there is nothing to continue",
            next_step=f"follow it, or wait for its end: flotilla run watch {active.run_id}",
        )

    async def _pause(self, active: RunHandle) -> None:
        """Let the run begin no further step, and record that; a second pause changes nothing."""
        if active.control.paused:
            return
        active.control.pause()
        try:
            await self.ledger.update_run(active.run_id, state=RunState.PAUSED, stays=False)
        except FlotillaError:
            active.control.unpause()
            raise
        active.status.notice(info("a pause after the current step was asked for"))

    async def _unpause(self, active: RunHandle) -> None:
        """End a pause, unless the run is about to end, because its end would be overwritten in the ledger."""
        if not _goes_on(active):
            raise FailedPrecondition(
                f"run {active.run_id} is being stopped, or ends by itself",
                next_step=f"resume it once it has ended: flotilla run resume {active.run_id}",
            )
        await self.ledger.update_run(active.run_id, state=RunState.RUNNING, stays=False)
        active.control.unpause()

    async def _configure(
        self, record: RunRecord, active: RunHandle | None, assignments: Sequence[str]
    ) -> None:
        """Change the run's settings, and record them; a run that ended early gets them when it is resumed."""
        before = load_text(RunConfig, record.config_yaml, source=f"run {record.run_id}")
        config = changed_config(before, assignments, _steps_done(record, active))
        plan = await self._starter.planned(config, begins=False)
        # Meanwhile the run has made steps, perhaps its last one.
        steps_done = _steps_done(record, active)
        config = changed_config(before, assignments, steps_done)
        if not (changes := differences(before, config)):
            return
        # This is not done in a thread: the loop must get no turn between that check and the ledger's queue.
        text = dump_yaml(config)
        RunDirectory(Path(record.directory)).write_change(steps_done, text, changes)
        if active is not None:
            active.control.configure(config)
        try:
            await self.ledger.update_run(record.run_id, config_yaml=text, stays=False)
        except FlotillaError:
            if active is not None:
                active.control.configure(before)
            raise
        if active is not None:
            for text in plan.warnings:
                if any(key in text for key in changes):
                    active.status.notice(warning(text))

    async def _try_disk(self, active: RunHandle) -> None:
        """Let a run that waits for room on a disk check at once."""
        active.control.try_again()
        if self.ledger.full is not None:
            with contextlib.suppress(DiskFull):
                await self.ledger.beat()

    def _disk_changed(self, full: DiskFull | None) -> None:
        for active in list(self._active.values()):
            active.ledger_full(full)

    async def find(self, run_id: str) -> run_pb2.Run:
        """Return a run by its id, a unique prefix of it, or `latest`."""
        await self._recovered.wait()
        return self._message(await self.ledger.get_run(run_id))

    async def configuration(self, run_id: str) -> str:
        """Return the resolved configuration of a run."""
        record = await self.ledger.get_run(run_id)
        return record.config_yaml

    async def list(self, limit: int) -> list[run_pb2.Run]:
        """Return the runs, newest first."""
        await self._recovered.wait()
        return [self._message(record) for record in await self.ledger.list_runs(limit or LIST_LIMIT)]

    def services(self) -> Sequence[pb.Service]:
        """Return all services in the registry, by their names."""
        return [self.service(one) for one in sorted(self._fleet.registrations.values(), key=lambda r: r.name)]

    def service(self, registration: Registration) -> pb.Service:
        """Return one service as the fleet and its run see it."""
        service = pb.Service(registration=registration, run_id=self._fleet.holder(registration))
        if (status := self._fleet.describe(registration)) is not None:
            service.work_state = WORK_STATES[status.state]
            service.work_state_reason = status.why
            if registration.kind == SERVICE_KIND_GENERATOR:
                service.outstanding_tokens = status.outstanding
        active = self._active.get(service.run_id)
        if active is None or active.context is None:
            return service
        instance_id = registration.instance_id
        if (sleeping := active.context.sleeping_generators) is not None:
            service.asleep = sleeping.sleeps(instance_id)
        if not active.status.ended:
            versions = {one.gang.instance_id: one.version for one in active.context.learners.sessions}
            version = versions.get(instance_id) or active.context.sync.serving.live_version(instance_id)
            if version is not None:
                service.live_version.CopyFrom(version.to_proto())
        return service

    def active(self, run_id: str) -> RunHandle | None:
        """Return the handles of an active run."""
        return self._active.get(run_id)

    def active_runs(self) -> Sequence[RunHandle]:
        """Return the runs that have services now, in the order of their start."""
        return [active for active in self._active.values() if not active.status.ended]

    async def close(self) -> None:
        """End every run now, because the coordinator stops: recorded, or left to the next coordinator."""
        self.ledger.give_up_waiting()
        await self._calls.settle()  # runs that are being started or resumed are then active
        tasks = []
        for active in self._active.values():
            if active.task is not None and not active.task.done():
                if self.host.stack.coordinator.keep_runs and not active.control.stop_requested:
                    active.left = True
                else:
                    active.control.stop_requested = True
                active.abandoned = True
                active.cancel()
                tasks.append(active.task)
        if tasks:
            await asyncio.wait(tasks)  # unlike gather, a limit that ends this wait does not cut the records
        await self._starter.trackers.close()
        await self.events.close()

    def _message(self, record: RunRecord) -> run_pb2.Run:
        active = self._active.get(record.run_id)
        return active.status.run if active is not None else stored_run(record)


def changeable(record: RunRecord, active: RunHandle | None) -> RunHandle:
    """Return the handles of an active run whose steps this coordinator makes; raise where it is none."""
    if active is None or not _goes_on(active):
        raise FailedPrecondition(
            f"run {record.run_id} is not active", next_step=f"see `flotilla run show {record.run_id}`"
        )
    if active.control.over:
        raise FailedPrecondition(
            f"run {record.run_id} has made its last step",
            why="what is left is its end: weights, evaluation, checkpoint, export",
            next_step=f"to train further, fork it: flotilla run fork {record.run_id} steps=N",
        )
    if active.config.loop == "client":
        raise FailedPrecondition(
            f"a client makes the steps of run {record.run_id}",
            why="it pauses by making none, and says with each call what it wants of it",
            next_step="change it where the client runs",
        )
    return active


def _goes_on(active: RunHandle) -> bool:
    """Return whether the run's end has neither begun nor been requested."""
    return not (active.control.stop_requested or active.ending or active.status.ended)


def _steps_done(record: RunRecord, active: RunHandle | None) -> int:
    """Return the steps done of a run that accepts other settings; raise where it accepts none."""
    if record.state.resumable and active is None:
        return stored_run(record).step
    return changeable(record, active).status.run.step
