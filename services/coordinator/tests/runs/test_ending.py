"""However a run ends, its end is recorded once, watchers are let go and the trainer is free again."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger import queries
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.ledger.schema import connect_read_only
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs import executor, status
from flotilla_coordinator.runs.active import RunHandle
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.executor import MOST_IN_A_ROW
from flotilla_coordinator.runs.resume import StartPoint
from flotilla_coordinator.runs.status import RunStatus
from flotilla_coordinator.trainers.learners import Learners
from flotilla_coordinator.trainers.session import Gang
from flotilla_core.config import RunConfig
from flotilla_core.errors import FlotillaError, RankFailed, Unavailable, WeightGroupFailed
from flotilla_core.findings import info
from flotilla_core.roles import CRITIC, POLICY
from flotilla_testing.files import NO_FILES, to_nobody
from flotilla_trackers import follow
from flotilla_trackers.follow import Trackers

RUN = "run-1"
CONFIG = RunConfig.model_validate(
    {"name": "run", "steps": 3, "data": {"train": "x.jsonl"}, "rewards": [{"reward": "exact"}]}
)


async def nothing() -> None:
    """Closes."""


@dataclass
class Closing:
    """A collaborator of which only the end matters."""

    close: Callable[[], Awaitable[None]] = nothing


@dataclass
class ClosingSync(Closing):
    """A weight sync of which only the end matters."""

    end_check: Callable[[], Awaitable[None]] = nothing


@dataclass
class Session(Closing):
    """A gang that is there, or not."""

    role: str = POLICY
    opened: bool = True
    is_lost: bool = False

    @property
    def gang(self) -> Gang:
        nobody: Any = None
        return Gang(self.role, nobody, f"{self.role}-1", 1.0, self.role, NO_FILES, None, to_nobody)

    async def lost(self) -> bool:
        return self.is_lost


@dataclass
class Context:
    """The parts of a built run that its executor uses."""

    status: RunStatus | None = None
    run_id: str = RUN
    stop_requested: bool = False
    begun: bool = False
    autoscaler: None = None
    steps_done: int = 0
    pinned: Closing | None = field(default_factory=Closing)
    source: Closing = field(default_factory=Closing)
    sync: ClosingSync = field(default_factory=ClosingSync)
    checkpoints: Closing = field(default_factory=Closing)
    lag: Closing = field(default_factory=Closing)
    policy: Session = field(default_factory=Session)
    critic: Session = field(default_factory=lambda: Session(role=CRITIC))

    @property
    def learners(self) -> Learners:
        policy: Any = self.policy
        critic: Any = self.critic
        return Learners(policy, critic)


class Directory(RunDirectory):
    """A run directory whose reports may fail."""

    broken: Exception | None = None
    state_before: RunState | None = None
    """The state in the ledger when the outcome is written."""

    def finish(self, run: run_pb2.Run) -> None:
        with closing(connect_read_only(self.path / "ledger.sqlite")) as db:
            self.state_before = queries.run(db, RUN).state
        if self.broken is not None:
            raise self.broken


@dataclass
class Bench:
    ledger: Ledger
    active: RunHandle
    directory: Directory
    context: Context
    ejected: list[str]

    async def end(self) -> RunRecord:
        """The record after the run has ended; all watchers have ended too."""
        assert self.active.task is not None
        watching = asyncio.create_task(self._watched())
        await asyncio.wait_for(asyncio.wait([self.active.task]), 50)
        await asyncio.wait_for(watching, 50)
        assert self.active.status.ended and self.active.context is None
        return await self.ledger.get_run(RUN)

    async def _watched(self) -> None:
        async for _ in self.active.events.follow(0):
            pass


Loop = Callable[[Any, StartPoint], Awaitable[None]]
Start = Callable[..., Bench]
AT_THE_START = StartPoint()


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, "", str(tmp_path), 0.0))
    context, trackers = Context(), Trackers()
    monkeypatch.setattr(follow, "CLOSE_S", 0.0)

    class RunWiring:
        def __init__(self, *_: Any) -> None:
            """Needs nothing."""

        async def build(self, directory: RunDirectory, lineage: int, fence: int) -> tuple[Context, None]:
            await asyncio.sleep(0)
            return context, None

    monkeypatch.setattr(executor, "RunWiring", RunWiring)

    def started(loop: Loop, start_point: StartPoint = AT_THE_START, config: RunConfig = CONFIG) -> Bench:
        monkeypatch.setattr(executor, "run_loop", loop)
        events = EventLog(lambda event: None)
        active = RunHandle(RUN, RunControl(config), RunStatus(run_pb2.Run(run_id=RUN), events), events)
        directory = Directory(tmp_path)
        context.status = active.status
        nobody: Any = None
        ejected: list[str] = []

        async def gang_lost(role: str, instance_id: str, why: str) -> None:
            ejected.append(instance_id)

        fleet: Any = SimpleNamespace(begin=lambda fence: None, gang_lost=gang_lost, close=nothing)
        run = executor.RunExecutor(nobody, fleet, ledger, active, directory, trackers)
        active.task = asyncio.create_task(run.execute(start_point))
        return Bench(ledger, active, directory, context, ejected)

    yield started
    await trackers.close()
    ledger.close()


async def test_a_run_that_went_through_has_succeeded(start: Start) -> None:
    async def loop(run: Any, start_point: StartPoint) -> None:
        await asyncio.sleep(0)

    bench = start(loop)
    assert (await bench.end()).state == RunState.SUCCEEDED
    assert bench.directory.state_before == RunState.RUNNING, (
        "a coordinator that dies in between leaves it to the next"
    )


async def test_a_tracker_that_hangs_holds_up_neither_a_run_nor_its_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "hangs"
    code = f"import pathlib, time; pathlib.Path({str(hanging)!r}).touch(); time.sleep(1000)"
    monkeypatch.setattr(follow, "COMMAND", (sys.executable, "-c", code))

    async def loop(run: Any, start_point: StartPoint) -> None:
        while not hanging.exists():
            await asyncio.sleep(0.01)

    bench = start(loop, config=RunConfig.model_validate({**CONFIG.model_dump(), "trackers": ["wandb"]}))
    assert (await bench.end()).state == RunState.SUCCEEDED
    following = [task for task in asyncio.all_tasks() if task.get_name() == f"tracker wandb of {RUN}"]
    assert len(following) == 1 and not following[0].done()


async def test_a_failure_is_one_message_in_its_parts(start: Start) -> None:
    async def loop(run: Any, start_point: StartPoint) -> None:
        raise error

    error = RankFailed("rank 1 was killed", where="trainer", why="no memory", next_step="see its log")
    bench = start(loop)
    record = await bench.end()
    assert record.state == RunState.FAILED and record.reason == error.finding()
    told = bench.active.status.run
    assert (told.finding, told.reason) == (error.finding(), str(error))


@pytest.mark.parametrize("role", [POLICY, CRITIC])
async def test_a_run_that_lost_a_gang_begins_again_under_the_next_lineage(start: Start, role: str) -> None:
    start_points = []

    async def loop(run: Any, start_point: StartPoint) -> None:
        start_points.append(start_point)
        session = getattr(run, role)
        session.is_lost = len(start_points) == 1
        if session.is_lost:
            raise WeightGroupFailed("the broadcast broke")

    bench = start(loop)
    assert (await bench.end()).state == RunState.SUCCEEDED
    assert start_points == [StartPoint(0), StartPoint(1)]
    assert bench.ejected == [f"{role}-1"]


@pytest.mark.parametrize("error", [RankFailed("rank 1 was killed"), Unavailable("the trainer went away")])
async def test_a_gang_that_was_lost_with_the_coordinator_is_waited_for_like_any_other(
    start: Start, error: FlotillaError
) -> None:
    start_points = []

    async def loop(run: Any, start_point: StartPoint) -> None:
        start_points.append(start_point)
        run.policy.opened = len(start_points) > 1
        if not run.policy.opened:
            raise error

    back = StartPoint(1, after_coordinator=True)
    bench = start(loop, back)
    assert (await bench.end()).state == RunState.SUCCEEDED
    assert start_points == [back, back] and bench.ejected == [f"{POLICY}-1"]


async def test_a_new_run_whose_gang_cannot_open_fails_at_once(start: Start) -> None:
    async def loop(run: Any, start_point: StartPoint) -> None:
        run.policy.opened = False
        raise Unavailable("the trainer went away")

    bench = start(loop)
    assert (await bench.end()).state == RunState.FAILED and bench.ejected == []


async def test_the_checkpoint_that_a_user_named_is_asked_for_until_the_run_has_begun_there(
    start: Start,
) -> None:
    start_points = []

    async def loop(run: Any, start_point: StartPoint) -> None:
        start_points.append(start_point)
        run.begun = len(start_points) > 1
        run.policy.is_lost = len(start_points) < 3
        if run.policy.is_lost:
            raise RankFailed("rank 1 was killed")

    named = StartPoint(1, "step-000002", by_user=True)
    assert (await start(loop, named).end()).state == RunState.SUCCEEDED
    assert start_points == [named, named, StartPoint(1)]


async def test_a_trainer_that_is_lost_again_and_again_ends_the_run_with_the_reason(start: Start) -> None:
    tries = []

    async def loop(run: Any, start_point: StartPoint) -> None:
        run.policy.is_lost = True
        # The first loss comes after three steps, the others before another one.
        run.steps_done = 3 if not tries else len(tries) - 1
        tries.append(start_point)
        raise RankFailed("rank 1 was killed")

    record = await start(loop).end()
    assert record.state == RunState.FAILED and len(tries) == 1 + MOST_IN_A_ROW
    assert "got no further in between" in record.reason.what and "rank 1 was killed" in record.reason.why


async def test_a_stop_ends_what_waits_and_says_why(start: Start) -> None:
    waiting = asyncio.Event()

    async def loop(run: Any, start_point: StartPoint) -> None:
        waiting.set()
        await asyncio.Event().wait()

    bench = start(loop)
    await asyncio.wait_for(waiting.wait(), 50)
    bench.active.request_stop("enough")
    bench.active.cancel()
    record = await bench.end()
    assert record.state == RunState.STOPPED and record.reason == info("enough")


async def test_a_run_that_is_left_to_the_next_coordinator_keeps_its_gangs_and_its_record(
    start: Start,
) -> None:
    waiting, ended_sessions = asyncio.Event(), []

    async def loop(run: Any, start_point: StartPoint) -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def session_ends() -> None:
        ended_sessions.append(POLICY)

    bench = start(loop)
    bench.context.policy.close = session_ends
    await asyncio.wait_for(waiting.wait(), 50)
    bench.active.left = True
    bench.active.cancel()
    assert bench.active.task is not None
    await asyncio.wait_for(asyncio.wait([bench.active.task]), 50)
    assert (await bench.ledger.get_run(RUN)).state == RunState.RUNNING
    assert not ended_sessions


async def test_a_stop_before_the_services_are_there_ends_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = asyncio.Event()

    async def build(self: Any, directory: RunDirectory, lineage: int, fence: int) -> Any:
        building.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(executor.RunWiring, "build", build)
    bench = start(nothing_at_all)
    await asyncio.wait_for(building.wait(), 50)
    bench.active.request_stop("")
    record = await bench.end()
    assert record.state == RunState.STOPPED and record.reason == info("stopped by request")


def test_a_run_shows_how_far_the_service_is_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[run_pb2.RunEvent] = []
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns)
    monkeypatch.setattr(status, "time", clock)
    shown = RunStatus(run_pb2.Run(run_id=RUN), EventLog(seen.append))
    shown.enter("open session")
    since = run_pb2.Run.FromString(shown.run.SerializeToString()).phase_since
    seen.clear()
    for mib in range(0, 121, 2):  # a look every two seconds
        shown.progress("trainer-0", f"fetching x from a:1: {mib} of 400 MiB")
        now += 2
    assert shown.run.phase == "open session: trainer-0 is fetching x from a:1: 120 of 400 MiB"
    assert shown.run.phase_since == since, "the phase is the same"
    notices = [event.notice.text for event in seen if event.WhichOneof("event") == "notice"]
    assert notices == [
        f"open session: trainer-0 is fetching x from a:1: {mib} of 400 MiB" for mib in (60, 120)
    ]
    assert len(seen) == 14, "and an event every ten seconds"
    shown.progress("trainer-0", "")
    assert shown.run.phase == "open session"


async def test_a_stop_that_comes_while_the_run_ends_cuts_no_record_short(start: Start) -> None:
    closing, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        closing.set()
        await go_on.wait()

    bench = start(nothing_at_all)
    bench.context.source.close = slow
    await asyncio.wait_for(closing.wait(), 50)
    bench.active.cancel()
    go_on.set()
    assert (await bench.end()).state == RunState.SUCCEEDED


@pytest.mark.parametrize("error", [Unavailable("it is gone"), RuntimeError("a defect")])
async def test_a_collaborator_that_cannot_be_closed_holds_up_nothing(start: Start, error: Exception) -> None:
    closed = []

    async def fails() -> None:
        raise error

    async def closes() -> None:
        closed.append("policy")

    bench = start(nothing_at_all)
    bench.context.source.close = fails
    bench.context.policy.close = closes
    assert (await bench.end()).state == RunState.SUCCEEDED and closed == ["policy"]


async def test_a_report_that_cannot_be_written_holds_up_no_watcher(start: Start) -> None:
    bench = start(nothing_at_all)
    bench.directory.broken = OSError(28, "No space left on device")
    assert (await bench.end()).state == RunState.SUCCEEDED


async def nothing_at_all(run: Any, start_point: StartPoint) -> None:
    await asyncio.sleep(0)
