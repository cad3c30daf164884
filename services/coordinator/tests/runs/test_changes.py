"""Starts and changes: what was answered is so, also for the coordinator that comes after, and nothing is half done."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.fleet import Fleet
from flotilla_coordinator.ledger.records import RunState
from flotilla_coordinator.runs import start
from flotilla_coordinator.runs.active import RunHandle
from flotilla_coordinator.runs.executor import RunExecutor
from flotilla_coordinator.runs.registry import Runs
from flotilla_coordinator.runs.resume import StartPoint
from flotilla_core.config import RunConfig, load_text
from flotilla_core.errors import Exhausted, FailedPrecondition, InvalidConfig, InvalidRequest

CONFIG = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nrewards: [{reward: exact}]\n"


class Held:
    """A call on the ledger that waits for its answer."""

    def __init__(self) -> None:
        self.asked, self.let = asyncio.Event(), asyncio.Event()


async def leave(caller: asyncio.Task[Any], held: Held) -> None:
    """The caller goes away before the ledger has answered."""
    await asyncio.wait_for(held.asked.wait(), 5)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    held.let.set()


class Bench:
    """The runs of one coordinator; a run that is launched goes on until it is stopped."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.ledger = runs, runs.ledger

    def of_the_next_coordinator(self) -> Bench:
        host = self.runs.host
        return Bench(Runs(host, Fleet(host, lambda: True), self.ledger, self.runs.events))

    async def stored(self, run: run_pb2.Run) -> RunConfig:
        return load_text(RunConfig, (await self.ledger.get_run(run.run_id)).config_yaml)

    def active(self, run: run_pb2.Run) -> RunHandle:
        """A run that goes on."""
        active = self.runs.active(run.run_id)
        assert active is not None
        return active

    def hold(self, monkeypatch: pytest.MonkeyPatch, method: str) -> Held:
        """Let `method` of the ledger act at once, but hold its answer until the test releases it."""
        held, real = Held(), getattr(self.ledger, method)

        async def ask(*args: Any, **changes: Any) -> None:
            await real(*args, **changes)
            held.asked.set()
            await held.let.wait()

        monkeypatch.setattr(self.ledger, method, ask)
        return held

    async def end(self, run: run_pb2.Run) -> None:
        active = self.runs.active(run.run_id)
        assert active is not None and active.task is not None
        await asyncio.sleep(0)  # it has begun
        active.cancel()
        await asyncio.wait({active.task}, timeout=5)
        await asyncio.sleep(0)
        await self.ledger.update_run(run.run_id, state=RunState.STOPPED)


@pytest.fixture
def bench(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Bench:
    def plan(config: RunConfig, _stack: Any) -> run_pb2.Plan:
        ahead = config.rollout.max_staleness
        return run_pb2.Plan(
            errors=["checkpoints fill the disk"] if config.checkpoint.keep > 100 else [],
            warnings=["batches are small", f"rollout.max_staleness = {ahead} is much"] if ahead > 9 else [],
        )

    monkeypatch.setattr(start, "plan_run", plan)
    return Bench(runs)


async def test_a_pause_is_in_the_ledger_until_the_run_goes_on(bench: Bench) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    for _ in range(2):
        await bench.runs.pause(run.run_id)
    active = bench.runs.active(run.run_id)
    assert active is not None and active.control.waits
    assert (await bench.ledger.get_run(run.run_id)).state is RunState.PAUSED
    with pytest.raises(FailedPrecondition, match="is using the trainer"):
        await bench.runs.start(CONFIG, "r2")
    for _ in range(2):
        assert (await bench.runs.resume(run.run_id, "", "r3")).run_id == run.run_id
    assert not active.control.waits
    assert (await bench.ledger.get_run(run.run_id)).state is RunState.RUNNING


async def test_a_coordinator_that_comes_after_goes_on_with_the_pause_and_the_settings(bench: Bench) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    await bench.runs.configure(run.run_id, ["steps=9"])
    await bench.runs.pause(run.run_id)
    for _ in range(5):
        later = bench.of_the_next_coordinator()
        await later.runs.recover()
        active = later.runs.active(run.run_id)
        assert active is not None and active.control.waits and active.config.steps == 9
        assert (await bench.ledger.get_run(run.run_id)).state is RunState.PAUSED
    await later.runs.resume(run.run_id, "", "r2")
    assert not active.control.waits
    await later.runs.close()


async def test_settings_are_in_every_record_before_the_run_goes_on_by_them(
    bench: Bench, tmp_path: Path
) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    await bench.runs.configure(run.run_id, ["steps=9"])
    await bench.runs.configure(run.run_id, ["checkpoint.keep=4", "steps=9"])
    active = bench.runs.active(run.run_id)
    assert active is not None and (active.config.steps, active.config.checkpoint.keep) == (9, 4)
    stored = await bench.stored(run)
    assert (stored.steps, stored.checkpoint.keep) == (9, 4)
    folder = Path(run.directory)
    lines = [json.loads(line) for line in (folder / "changes.jsonl").read_text().splitlines()]
    assert [line["changes"] for line in lines] == [
        {"steps": {"from": 3, "to": 9}},
        {"checkpoint.keep": {"from": 2, "to": 4}},
    ]
    written = [load_text(RunConfig, (folder / name).read_text()) for name in ("run.yaml", "run-3.yaml")]
    assert [(one.steps, one.checkpoint.keep) for one in written] == [(3, 2), (9, 4)]


@pytest.mark.parametrize(
    ("assignments", "error"),
    [
        (["seed=1"], InvalidRequest),
        (["steps=many"], InvalidConfig),
        (["checkpoint.keep=101", "steps=9"], InvalidConfig),
    ],
)
async def test_a_refused_change_changes_nothing(
    bench: Bench, assignments: list[str], error: type[Exception]
) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    with pytest.raises(error):
        await bench.runs.configure(run.run_id, assignments)
    active = bench.runs.active(run.run_id)
    assert active is not None and active.config.steps == (await bench.stored(run)).steps == 3
    assert not (Path(run.directory) / "changes.jsonl").exists()


async def test_what_a_plan_says_of_the_changed_settings_is_said(bench: Bench) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    told: list[str] = []
    active = bench.active(run)
    active.status.notice = lambda finding: told.append(finding.what)  # type: ignore[method-assign]
    await bench.runs.configure(run.run_id, ["rollout.max_staleness=10"])
    assert told == ["rollout.max_staleness = 10 is much"]
    await bench.runs.configure(run.run_id, ["steps=99"])
    assert len(told) == 1, "what it says of other settings was said when the run began"


async def test_a_stopped_run_takes_settings_and_goes_on_by_them(bench: Bench) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    await bench.end(run)
    assert (await bench.runs.configure(run.run_id, ["steps=8"])).total_steps == 8
    assert (await bench.runs.resume(run.run_id, "", "r2")).total_steps == 8
    active = bench.runs.active(run.run_id)
    assert active is not None and active.config.steps == 8


async def test_a_run_that_does_not_go_on_cannot_be_paused(bench: Bench) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    await bench.runs.stop(run.run_id, "enough")
    with pytest.raises(FailedPrecondition, match="is not active"):
        await bench.runs.pause(run.run_id)
    with pytest.raises(FailedPrecondition, match="is not active"):
        await bench.runs.configure(run.run_id, ["steps=8"])


async def test_a_run_after_its_last_step_takes_no_changes(bench: Bench) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    active = bench.runs.active(run.run_id)
    assert active is not None
    active.control.over = True
    with pytest.raises(FailedPrecondition, match="has made its last step"):
        await bench.runs.configure(run.run_id, ["steps=9"])
    with pytest.raises(FailedPrecondition, match="has made its last step"):
        await bench.runs.pause(run.run_id)
    assert (await bench.stored(run)).steps == 3


async def test_who_makes_the_steps_himself_pauses_himself(bench: Bench) -> None:
    run = await bench.runs.start(f"{CONFIG}loop: client\n", "r1")
    with pytest.raises(FailedPrecondition, match="a client makes the steps"):
        await bench.runs.pause(run.run_id)
    with pytest.raises(FailedPrecondition, match="a client makes the steps"):
        await bench.runs.configure(run.run_id, ["steps=8"])


async def test_a_start_whose_caller_goes_away_is_one_run_however_often_it_is_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = bench.hold(monkeypatch, "save_run")
    await leave(asyncio.create_task(bench.runs.start(CONFIG, "r1")), held)
    run = await bench.runs.start(CONFIG, "r1")
    assert [record.run_id for record in await bench.ledger.list_runs()] == [run.run_id]
    assert bench.active(run).task is not None and not bench.active(run).status.ended


async def test_a_resume_whose_caller_goes_away_is_worked_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    await bench.end(run)
    held = bench.hold(monkeypatch, "update_run")
    await leave(asyncio.create_task(bench.runs.resume(run.run_id, "", "r2")), held)
    await bench.runs.pause(run.run_id)  # which is for runs that somebody works on
    assert (await bench.runs.resume(run.run_id, "", "r2")).run_id == run.run_id


async def test_a_run_that_is_being_started_when_the_coordinator_goes_is_ended_with_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, ended = bench.hold(monkeypatch, "save_run"), asyncio.Event()
    execute = RunExecutor.execute

    async def noting(execution: RunExecutor, start_point: StartPoint) -> None:
        try:
            await execute(execution, start_point)
        finally:
            ended.set()

    monkeypatch.setattr(RunExecutor, "execute", noting)
    await leave(asyncio.create_task(bench.runs.start(CONFIG, "r1")), held)
    await asyncio.wait_for(bench.runs.close(), 5)
    assert ended.is_set() and not bench.runs.active_runs()


@pytest.mark.parametrize(
    ("done", "told"),
    [({"over": True}, "has made its last step"), ({"stop_requested": True}, "is not active")],
)
async def test_settings_that_are_checked_until_the_run_is_at_its_end_are_refused_and_nowhere_recorded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, done: dict[str, bool], told: str
) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    control = bench.active(run).control

    def plan(_config: RunConfig, _stack: Any) -> run_pb2.Plan:
        for name, value in done.items():
            setattr(control, name, value)
        return run_pb2.Plan()

    monkeypatch.setattr(start, "plan_run", plan)
    with pytest.raises(FailedPrecondition, match=told):
        await bench.runs.configure(run.run_id, ["steps=9"])
    assert control.config.steps == (await bench.stored(run)).steps == 3
    assert not (Path(run.directory) / "changes.jsonl").exists()


async def test_a_last_step_that_was_made_while_it_was_checked_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench.runs.start(CONFIG, "r1")

    def plan(_config: RunConfig, _stack: Any) -> run_pb2.Plan:
        bench.active(run).status.run.step = 2
        return run_pb2.Plan()

    monkeypatch.setattr(start, "plan_run", plan)
    with pytest.raises(InvalidRequest, match="2 steps are done"):
        await bench.runs.configure(run.run_id, ["steps=2"])
    assert (await bench.stored(run)).steps == 3


@pytest.mark.parametrize("change", ["configure", "pause"])
async def test_the_run_knows_a_change_before_the_ledger_answers_so_that_it_cannot_end_beside_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    held, control = bench.hold(monkeypatch, "update_run"), bench.active(run).control
    wish = bench.runs.configure(run.run_id, ["steps=9"]) if change == "configure" else None
    asking = asyncio.create_task(wish or bench.runs.pause(run.run_id))
    await asyncio.wait_for(held.asked.wait(), 5)
    assert (control.config.steps, control.paused) == ((9, False) if wish else (3, True))
    held.let.set()
    await asyncio.wait_for(asking, 5)


@pytest.mark.parametrize("change", ["configure", "pause"])
async def test_a_change_that_the_ledger_cannot_take_is_taken_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    run = await bench.runs.start(CONFIG, "r1")

    async def full(*_: Any, **__: Any) -> None:
        raise Exhausted("the ledger cannot grow")

    with monkeypatch.context() as patched, pytest.raises(Exhausted):
        patched.setattr(bench.ledger, "update_run", full)
        await (
            bench.runs.pause(run.run_id)
            if change == "pause"
            else bench.runs.configure(run.run_id, ["steps=9"])
        )
    control = bench.active(run).control
    assert control.config.steps == 3 and not control.paused


async def test_a_pause_is_not_taken_back_from_a_run_that_is_being_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench.runs.start(CONFIG, "r1")
    begun: Any = SimpleNamespace()
    bench.active(run).context = begun  # so that a stop waits for the step
    await bench.runs.pause(run.run_id)
    held = bench.hold(monkeypatch, "stopping")
    stopping = asyncio.create_task(bench.runs.stop(run.run_id, "enough"))
    await asyncio.wait_for(held.asked.wait(), 5)
    with pytest.raises(FailedPrecondition, match="is being stopped"):
        await bench.runs.resume(run.run_id, "", "r2")
    held.let.set()
    assert (await asyncio.wait_for(stopping, 5)).state == run_pb2.RUN_STATE_STOPPING
    with pytest.raises(FailedPrecondition, match="is being stopped"):
        await bench.runs.resume(run.run_id, "", "r2")
    assert (await bench.ledger.get_run(run.run_id)).state is RunState.STOPPING


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_coordinator_that_keeps_runs_leaves_those_that_no_user_has_stopped(
    bench: Bench, stopped: bool
) -> None:
    host: Any = bench.runs.host
    kept = host.stack.coordinator.model_copy(update={"keep_runs": True})
    host.stack = host.stack.model_copy(update={"coordinator": kept})
    active = bench.active(await bench.runs.start(CONFIG, "r1"))
    if stopped:
        active.control.stop()
    await bench.runs.close()
    assert active.left is not stopped
