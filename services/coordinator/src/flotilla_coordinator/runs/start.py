"""Starts runs: new ones, those that a user resumes, and those that an earlier coordinator left.

Invariants: a run is in the ledger before any part of it works. A run for which the active runs leave no gang or no
generator is refused with their names. Runs that an earlier coordinator left get their services back before any of them
works. A run that cannot continue is closed as failed, with its samples accounted for. A run does not continue by itself
where its user wanted it to end, or to resume it; nor where a client makes its steps, because only the client can decide
that; nor where coordinators die repeatedly under it without a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flotilla.common.v1.finding_pb2 import SEVERITY_ERROR, Finding
from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.fleet import Fleet, ResourceRequest
from flotilla_coordinator.fleet.run_fleet import RunFleet
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason, RunRecord, RunState
from flotilla_coordinator.plan import plan_run, remarks
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs.active import RunHandle
from flotilla_coordinator.runs.checkpoints import BEST, CONFIGURATION, Progress, named_best
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.executor import RunExecutor
from flotilla_coordinator.runs.fork import Forked
from flotilla_coordinator.runs.resume import FROM_START, StartPoint
from flotilla_coordinator.runs.status import RunStatus, continued_run, record_end
from flotilla_coordinator.views.runs import interrupted_run, interruption
from flotilla_core import ids
from flotilla_core.bus import EventStream
from flotilla_core.checkpoint import CheckpointShelf, on_disk
from flotilla_core.checkpoint.manifest import FILE_NAME as MANIFEST
from flotilla_core.config import RunConfig, dump_yaml, load_text
from flotilla_core.config.model import checked_url
from flotilla_core.errors import (
    AlreadyExists,
    DiskFull,
    FailedPrecondition,
    FlotillaError,
    InvalidConfig,
    InvalidRequest,
    Mismatch,
    NotFound,
)
from flotilla_core.files import make_private_folder
from flotilla_core.findings import info, warning
from flotilla_core.logger import get_logger
from flotilla_core.service import Host
from flotilla_core.transfer import own_folder
from flotilla_core.transfer.object_store import ObjectFolder
from flotilla_trackers.follow import Trackers

log = get_logger(__name__)

EVERY_RUN = -1
MOST_IN_A_ROW = 2


class RunStarter:
    """Starts new runs, resumes ended ones, and takes over those that an earlier coordinator left."""

    def __init__(self, host: Host, fleet: Fleet, ledger: Ledger, events: EventStream) -> None:
        self._host = host
        self._fleet = fleet
        self._ledger = ledger
        self._events = events
        self.trackers = Trackers()

    async def start(self, config_yaml: str) -> RunHandle:
        """Admit a run, or raise the reason against it."""
        config, plan = await self._checked(config_yaml)
        self._fleet.require_place(ResourceRequest.of(config))
        return await self._begun(ids.new_run_id(config.name), config, plan, config_yaml)

    async def fork(self, config_yaml: str, source: RunRecord, checkpoint: str, *, fresh: bool) -> RunHandle:
        """Admit a run that continues from a checkpoint of another one, or raise the reason against it."""
        config, plan = await self._checked(config_yaml)
        before = await asyncio.to_thread(
            load_text, RunConfig, source.config_yaml, source=f"run {source.run_id}"
        )
        self._fleet.require_place(ResourceRequest.of(config))
        folder = await asyncio.to_thread(_checkpoint_to_fork, source, before, checkpoint)
        run_id = ids.new_run_id(config.name)
        forked = await asyncio.to_thread(
            lambda: Forked.of(run_id, folder, before, config, fresh_optimizer=fresh)
        )
        return await self._begun(run_id, config, plan, config_yaml, forked)

    async def _begun(
        self,
        run_id: str,
        config: RunConfig,
        plan: run_pb2.Plan,
        config_yaml: str,
        forked: Forked | None = None,
    ) -> RunHandle:
        """Make the records of a new run, and begin it."""
        directory = RunDirectory.create(self._host.state_dir / "runs" / run_id)
        directory.write_configuration(dump_yaml(config), self._versions())
        run = run_pb2.Run(
            run_id=run_id,
            name=config.name,
            state=run_pb2.RUN_STATE_PENDING,
            total_steps=config.steps,
            directory=str(directory.path),
        )
        run.created_at.GetCurrentTime()
        record = RunRecord(
            run_id, config.name, RunState.RUNNING, config_yaml, str(directory.path), time.time()
        )
        start_point = StartPoint()
        if forked is not None:
            shelf = CheckpointShelf(directory.checkpoints_path)
            await asyncio.to_thread(on_disk, shelf.path, forked.write, shelf)
            progress = forked.progress
            run.step = progress.steps_done
            record = replace(
                record, step=progress.steps_done, version=progress.version, cursor=progress.cursor
            )
            start_point = StartPoint(progress.version.lineage + 1, forked.source.name)
        events = EventLog(lambda event: self._publish(run_id, directory, event))
        status = RunStatus(run, events, learns_by_rewards=config.learns_by_rewards)
        active = RunHandle(run_id, RunControl(config), status, events)
        await self._ledger.save_run(record)
        if forked is not None:
            active.status.notice(info(f"forked from {forked.source}: {forked.described}"))
        for remark in remarks(plan, forked=forked is not None):
            active.status.notice(remark)
        fleet = await self._fleet.admit(run_id, ResourceRequest.of(config))
        return self._execute(active, directory, start_point, fleet)

    async def resume(self, record: RunRecord, checkpoint: str) -> RunHandle:
        """Continue a run that ended before its last step, or raise the reason against it."""
        run_id, directory = record.run_id, RunDirectory(Path(record.directory))
        if record.state is RunState.SUCCEEDED:
            raise FailedPrecondition(
                f"run {run_id} has succeeded",
                why="there is nothing to continue",
                next_step=f"to train further, fork it: flotilla run fork {run_id} steps=N",
            )
        config, _ = await self._checked(record.config_yaml)
        self._fleet.require_place(ResourceRequest.of(config))
        if checkpoint == BEST:
            checkpoint = named_best(directory, config.checkpoint.best_by)
        _check_checkpoint(record, config, CheckpointShelf(directory.checkpoints_path), checkpoint)
        start_point = StartPoint(record.version.lineage + 1, checkpoint, by_user=True)
        await self._ledger.asked_for(run_id)
        active = await self._reopened(record, config, directory, start_point)
        fleet = await self._fleet.admit(run_id, ResourceRequest.of(active.config))
        return self._execute(active, directory, start_point, fleet)

    async def adopt(self, place: str) -> str:
        """Bring a run here whose checkpoints were copied to object storage, with the newest or the named one.

        Return its id. The ledger then has the run as a stopped one, with the steps of the checkpoint and no sample of
        them.
        """
        where, name, config_yaml = await asyncio.to_thread(_copied_run, place)
        config = load_text(RunConfig, config_yaml, source=f"{where}/{CONFIGURATION}")
        run_id = where.rpartition("/")[2]
        if run_id in {record.run_id for record in await self._ledger.list_runs(EVERY_RUN)}:
            raise AlreadyExists(
                f"run {run_id} is on this stack already",
                where=str(self._host.state_dir / "runs" / run_id),
                next_step=f"flotilla run resume {run_id}",
            )
        directory = RunDirectory(own_folder(self._host.state_dir, "runs", run_id))
        shelf = CheckpointShelf(directory.checkpoints_path)
        shelf.step_of(name)
        if name not in shelf.names():
            make_private_folder(shelf.path)
            fetched = shelf.path / f".{name}.fetched"
            await self._host.files.fetch_checkpoint(f"{where}/{name}", fetched, run_id=run_id)
            await asyncio.to_thread(on_disk, shelf.path, shelf.publish, name, fetched)
        progress = await asyncio.to_thread(Progress.of, shelf.folder(name))
        if progress.run_id != run_id:
            raise Mismatch(
                f"the checkpoint is of run {progress.run_id}",
                where=f"{where}/{name}",
                next_step="copy the folder of a run under its own name",
            )
        directory.write_configuration(config_yaml, {})
        now = time.time()
        await self._ledger.save_run(
            RunRecord(
                run_id,
                config.name,
                RunState.STOPPED,
                config_yaml,
                str(directory.path),
                now,
                ended_at=now,
                reason=info(f"it was brought here from {where}"),
                step=progress.steps_done,
                version=progress.version,
                cursor=progress.cursor,
            )
        )
        return run_id

    async def take_over(self, records: Sequence[RunRecord]) -> list[RunHandle]:
        """Continue or close the runs that an earlier coordinator left; return those that continue."""
        kept = [found for record in records if (found := await self._left(record)) is not None]
        fleets = await self._fleet.admit_again(
            [(active.run_id, ResourceRequest.of(active.config)) for _, active, _ in kept]
        )
        return [
            self._execute(active, directory, start_point, fleet)
            for (directory, active, start_point), fleet in zip(kept, fleets, strict=True)
        ]

    async def _left(self, record: RunRecord) -> tuple[RunDirectory, RunHandle, StartPoint] | None:
        """Prepare a run that an earlier coordinator left, or close it where it cannot continue."""
        directory = RunDirectory(Path(record.directory))
        why = await asyncio.to_thread(
            reason_not_to_resume, record, await self._ledger.takeovers(record.run_id)
        )
        if not why:
            start_point = StartPoint(record.version.lineage + 1, after_coordinator=True)
            try:
                # This comes before anything of the run is read: its plan alone may be what kills the coordinator.
                if record.state is not RunState.PAUSED:
                    await self._ledger.taken_over(record.run_id)
                config, _ = await self._checked(record.config_yaml, begins=False)
                return directory, await self._reopened(record, config, directory, start_point), start_point
            # A directory that is missing, or full, affects this run alone.
            except (FlotillaError, OSError) as error:
                why = _refused(record, error)
        await self._ledger.drop_in_flight(record.run_id, DropReason.RUN_INTERRUPTED)
        await self._complete_last_step(record, directory)
        run = await asyncio.to_thread(interrupted_run, record, why)
        await self._ledger.update_run(
            record.run_id,
            state=RunState(run.state),
            reason=run.finding,
            ended_at=run.ended_at.ToNanoseconds() / 1e9,
            step=run.step,
        )
        await asyncio.to_thread(record_end, run)
        return None

    async def planned(self, config: RunConfig, *, begins: bool) -> run_pb2.Plan:
        """Return the plan of a run that would work, or raise its errors.

        Trackers that cannot begin are errors where a user starts or resumes the run; no tracker ends one that goes on.
        """
        planned = config if begins else config.model_copy(update={"trackers": ()})
        plan = await asyncio.to_thread(plan_run, planned, self._host.stack)
        if plan.errors:
            raise InvalidConfig(
                "the run would not work", where=f"run {config.name}", why="; ".join(plan.errors)
            )
        return plan

    async def _reopened(
        self, record: RunRecord, config: RunConfig, directory: RunDirectory, start_point: StartPoint
    ) -> RunHandle:
        """Reopen a run of the ledger, with its events and metrics so far."""
        run_id = record.run_id
        completed = await self._complete_last_step(record, directory)
        run = await asyncio.to_thread(continued_run, record)
        run.total_steps = config.steps
        try:
            await asyncio.to_thread(directory.reopen, self._versions())
        except DiskFull as error:
            # The versions of the services are then recorded nowhere; that is no reason to give up a run that waits for
            # room.
            if not start_point.after_coordinator:
                raise
            log.warning("the versions of the services were not written", run_id=run_id, error=str(error))
        # A pause survives its coordinator; a user who resumes a run ends the pause.
        paused = start_point.after_coordinator and record.state is RunState.PAUSED
        state = RunState.PAUSED if paused else RunState.RUNNING
        await self._ledger.update_run(run_id, state=state, reason=Finding(), stays=False)
        newest = await asyncio.to_thread(directory.last_sequence)
        events = EventLog(lambda event: self._publish(run_id, directory, event), after=newest)
        status = RunStatus(run, events, learns_by_rewards=config.learns_by_rewards)
        active = RunHandle(run_id, RunControl(config, paused=paused), status, events)
        if start_point.after_coordinator:
            status.notice(warning("the coordinator had died and was restarted; the run continues"))
        if completed:
            status.step_done(record.step, record.version, completed)
        return active

    async def _complete_last_step(self, record: RunRecord, directory: RunDirectory) -> dict[str, float]:
        """Write the metrics of a step that its coordinator recorded and did not end; return those that were missing."""
        lineage, step = record.version.lineage, record.step - 1
        if await asyncio.to_thread(directory.last_step) >= (lineage, step):
            return {}
        metrics = await self._ledger.last_metrics(record.run_id)
        try:
            if metrics:
                directory.write_metrics(step, metrics, lineage=lineage)
        except OSError as error:  # a run without its directory is closed, and no other run suffers
            log.warning("metrics were not written", run_id=record.run_id, step=step, error=str(error))
        return metrics

    async def _checked(self, config_yaml: str, *, begins: bool = True) -> tuple[RunConfig, run_pb2.Plan]:
        """Return the configuration of a run that would work here, and its plan."""
        config = await asyncio.to_thread(load_text, RunConfig, config_yaml, source="run")
        return config, await self.planned(config, begins=begins)

    def _execute(
        self, active: RunHandle, directory: RunDirectory, start_point: StartPoint, fleet: RunFleet
    ) -> RunHandle:
        """Start the run's task, with the services that it was admitted to."""
        if self._ledger.full is not None:
            active.ledger_full(self._ledger.full)
        executor = RunExecutor(self._host, fleet, self._ledger, active, directory, self.trackers)
        active.task = asyncio.create_task(executor.execute(start_point), name=f"run {active.run_id}")
        return active

    def _versions(self) -> dict[str, dict[str, str]]:
        return {r.name: dict(r.versions) for r in self._fleet.registrations.values()}

    def _publish(self, run_id: str, directory: RunDirectory, event: run_pb2.RunEvent) -> None:
        """Write the event to the run directory and send it to the bus, unless another coordinator has the run."""
        if self._ledger.lost:
            return
        try:
            directory.write_event(event)
        except OSError as error:  # the ledger holds what must not be lost
            log.warning("an event was not written", run_id=run_id, error=str(error))
        self._events.publish(run_id, f"{run_id}/{event.sequence}", event.SerializeToString())


def _checkpoint_to_fork(source: RunRecord, config: RunConfig, name: str) -> Path:
    """Return the folder of the named checkpoint of a run, or of its newest one."""
    directory = RunDirectory(Path(source.directory))
    shelf = CheckpointShelf(directory.checkpoints_path)
    if name == BEST:
        name = named_best(directory, config.checkpoint.best_by)
    names = shelf.names()
    if not name and not names:
        raise NotFound(
            f"run {source.run_id} has no checkpoint to fork from",
            where=str(shelf.path),
            next_step="start a new run, or run it again with checkpoint.every_steps above 0",
        )
    return shelf.folder(name or names[-1])


def _check_checkpoint(record: RunRecord, config: RunConfig, shelf: CheckpointShelf, checkpoint: str) -> None:
    """Raise where a resume names a checkpoint that is not there, or would give up all steps without being told so."""
    if checkpoint and checkpoint != FROM_START:
        shelf.folder(checkpoint)
    if checkpoint or config.checkpoint.every_steps or not record.step or shelf.names():
        return
    raise FailedPrecondition(
        f"run {record.run_id} has no checkpoint to continue from",
        where=str(shelf.path),
        why=f"checkpoint.every_steps is 0, so its {record.step} steps can only be made again from the initial weights",
        next_step=f"do that with `flotilla run resume {record.run_id} --from {FROM_START}`, or start a new run with "
        "checkpoint.every_steps above 0",
    )


def reason_not_to_resume(record: RunRecord, takeovers: int) -> Finding | None:
    """Say why a run that an earlier coordinator left is not continued by itself; None where it is."""
    if record.state is RunState.STOPPING or RunDirectory(Path(record.directory)).read_outcome() is not None:
        return interruption(record.run_id)
    # A paused run makes no step, however healthy its coordinators are.
    if takeovers >= MOST_IN_A_ROW and record.state is not RunState.PAUSED:
        return Finding(
            severity=SEVERITY_ERROR,
            what=f"the run was taken over {takeovers} times after its coordinator had died, without a step in between, "
            "and is not taken over again by itself",
            next_step=f"See `flotilla logs coordinator`, then continue it: flotilla run resume {record.run_id}",
        )
    try:
        config = load_text(RunConfig, record.config_yaml, source="run")
    except InvalidConfig as error:
        return _refused(record, error)
    if config.resume == "by_user" or config.loop == "client":
        return interruption(record.run_id)
    return None


def _refused(record: RunRecord, error: FlotillaError | OSError) -> Finding:
    return Finding(
        severity=SEVERITY_ERROR,
        what="the run was not continued after its coordinator had died",
        why=str(error).rstrip("."),
        next_step=f"Continue it: flotilla run resume {record.run_id}",
    )


def _copied_run(place: str) -> tuple[str, str, str]:
    """Return where a run's copies are, the name of the wanted or newest whole one, and the run's configuration."""
    try:
        where, name = checked_url(place), ""
    except ValueError as error:
        raise InvalidRequest("this is no place of a run in object storage", why=str(error)) from None
    if where.rpartition("/")[2].startswith("step-"):
        where, _, name = where.rpartition("/")
    store = ObjectFolder(where)
    config_yaml = store.read_text(CONFIGURATION)
    found = [one for one in store.folders() if one.startswith("step-")] if not name else [name]
    whole = [one for one in found if ObjectFolder(f"{where}/{one}").read_text(MANIFEST) is not None]
    if config_yaml is None or not whole:
        raise NotFound(
            "there is no run with a whole checkpoint",
            where=where,
            why=f"it has no {CONFIGURATION}"
            if config_yaml is None
            else f"whole are none of {', '.join(found) or '(none)'}",
            next_step="name the folder of a run below its checkpoint.copy_to",
        )
    return where, max(whole, key=CheckpointShelf.step_of), config_yaml
