"""Some runs continue after their end, or after the death of their coordinator, in a new or the same lineage."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.fleet import Fleet
from flotilla_coordinator.ledger.records import DropReason, RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs import start
from flotilla_coordinator.runs.registry import LIST_LIMIT, Runs
from flotilla_coordinator.runs.resume import StartPoint
from flotilla_core.errors import FailedPrecondition, InvalidConfig, NotFound
from flotilla_core.findings import info
from flotilla_core.version import Version

CONFIG = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nrewards: [{reward: exact}]\n"
RUN = "run-20260314-0915-7f3a"


class Bench:
    """The runs of one coordinator; a run that is launched goes on until the end."""

    def __init__(self, folder: Path, runs: Runs, launched: list[StartPoint]) -> None:
        self.runs = runs
        self.ledger = runs.ledger
        self.launched = launched
        self.directory = RunDirectory.create(folder / "runs" / RUN)

    async def left(self, state: RunState, config: str = CONFIG) -> None:
        """Record a run as a killed coordinator leaves it."""
        record = RunRecord(RUN, "run", state, config, str(self.directory.path), 1.0, reason=info("enough"))
        await self.ledger.save_run(replace(record, step=2, version=Version(4, 2)))

    async def recorded(self, state: RunState) -> None:
        run = run_pb2.Run(
            run_id=RUN,
            name="run",
            state=run_pb2.RunState.ValueType(state),
            step=2,
            reason="why",
            total_steps=3,
        )
        self.directory.write_event(run_pb2.RunEvent(sequence=7, run=run))
        (self.directory.path / "outcome.json").write_text(json_format.MessageToJson(run))
        await self.ledger.save_run(
            RunRecord(
                RUN, "run", state, CONFIG, str(self.directory.path), 1.0, 2.0, info("why"), 2, Version(4, 2)
            )
        )


@pytest.fixture
def bench(tmp_path: Path, runs: Runs, launched: list[StartPoint]) -> Bench:
    return Bench(tmp_path, runs, launched)


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.STOPPED])
async def test_a_run_that_failed_or_was_stopped_goes_on_under_the_next_lineage(
    bench: Bench, state: RunState
) -> None:
    await bench.recorded(state)
    run = await bench.runs.resume(RUN, "", "r1")
    assert (run.run_id, run.step, run.reason) == (RUN, 2, "")
    assert not run.HasField("ended_at")
    assert (await bench.runs.resume(RUN, "", "r1")).run_id == RUN  # the same request
    assert bench.launched == [StartPoint(5, by_user=True)]
    assert (await bench.ledger.get_run(RUN)).state == RunState.RUNNING
    assert bench.directory.read_outcome() is None and bench.directory.last_sequence() == 8
    with pytest.raises(FailedPrecondition, match="has not ended"):
        await bench.runs.resume(RUN, "", "r2")
    with pytest.raises(FailedPrecondition, match=f"run {RUN} is using the trainer"):
        await bench.runs.start(CONFIG, "r3")


async def test_an_outcome_that_was_cut_off_hides_no_run_and_the_ledger_tells_its_end(bench: Bench) -> None:
    await bench.recorded(RunState.FAILED)
    for content in (b"", b'{"run_id": "ru', b"\xff"):
        (bench.directory.path / "outcome.json").write_bytes(content)
        (run,) = await bench.runs.list(0)
        assert (run.run_id, run.state, run.reason) == (RUN, run_pb2.RUN_STATE_FAILED, "why")
    await bench.runs.resume(RUN, "", "r1")
    assert bench.runs.active(RUN) is not None


async def test_a_run_that_succeeded_is_not_continued(bench: Bench) -> None:
    await bench.recorded(RunState.SUCCEEDED)
    with pytest.raises(FailedPrecondition, match=r"has succeeded.*flotilla run fork"):
        await bench.runs.resume(RUN, "", "r1")
    assert bench.launched == []


async def test_a_checkpoint_that_is_not_there_changes_nothing(bench: Bench) -> None:
    await bench.recorded(RunState.FAILED)
    with pytest.raises(NotFound, match="step-000001"):
        await bench.runs.resume(RUN, "step-000001", "r1")
    assert bench.launched == [] and (await bench.ledger.get_run(RUN)).state == RunState.FAILED
    (bench.directory.checkpoints_path / "step-000001").mkdir(parents=True)
    await bench.runs.resume(RUN, "step-000001", "r1")
    await asyncio.sleep(0)
    assert bench.launched == [StartPoint(5, "step-000001", by_user=True)]


async def test_a_run_whose_coordinator_died_goes_on_by_itself(bench: Bench) -> None:
    await bench.left(RunState.RUNNING)
    await bench.runs.recover()
    await asyncio.sleep(0)
    assert bench.launched == [StartPoint(5, after_coordinator=True)]
    assert (await bench.runs.find(RUN)).state == run_pb2.RUN_STATE_RUNNING
    assert (await bench.ledger.get_run(RUN)).state == RunState.RUNNING


async def test_a_run_goes_on_by_itself_however_many_came_and_ended_beside_it(bench: Bench) -> None:
    await bench.left(RunState.RUNNING)
    folder = str(bench.directory.path)
    for number in range(2 * LIST_LIMIT):
        await bench.ledger.save_run(
            RunRecord(f"later-{number}", "run", RunState.SUCCEEDED, CONFIG, folder, 2.0)
        )
    await bench.runs.recover()
    await asyncio.sleep(0)
    assert bench.launched == [StartPoint(5, after_coordinator=True)]


async def test_a_run_that_was_to_be_stopped_has_stopped_when_the_coordinator_is_back(bench: Bench) -> None:
    await bench.left(RunState.STOPPING)
    await bench.runs.recover()
    run = await bench.runs.find(RUN)
    assert bench.launched == [] and (run.state, run.reason) == (run_pb2.RUN_STATE_STOPPED, "enough")


@pytest.mark.parametrize("setting", ["resume: by_user", "loop: client"])
async def test_a_run_that_waits_for_somebody_does_not_go_on_by_itself(bench: Bench, setting: str) -> None:
    await bench.left(RunState.RUNNING, CONFIG + setting)
    await bench.runs.recover()
    run = await bench.runs.find(RUN)
    assert bench.launched == [] and run.state == run_pb2.RUN_STATE_FAILED
    assert f"flotilla run resume {RUN}" in run.reason


async def test_a_run_that_is_refused_now_says_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = run_pb2.Plan(errors=["there is no {critic} any more"])
    monkeypatch.setattr(start, "plan_run", lambda *_: plan)
    await bench.left(RunState.RUNNING)
    await bench.runs.recover()
    assert "no {critic} any more" in (await bench.runs.find(RUN)).reason


async def taken_over(bench: Bench) -> run_pb2.Run:
    """The run, once the coordinator has died and another one is back."""
    coordinator = Runs(bench.runs.host, Fleet(bench.runs.host, lambda: True), bench.ledger, bench.runs.events)
    await coordinator.recover()
    run = await coordinator.find(RUN)
    going_on = coordinator.active(RUN)
    if going_on is not None and going_on.task is not None:
        going_on.task.cancel()
        await asyncio.gather(going_on.task, return_exceptions=True)
    return run


async def test_a_run_under_which_coordinators_die_again_and_again_waits_for_a_user(bench: Bench) -> None:
    await bench.left(RunState.RUNNING)
    for _ in range(2):
        assert (await taken_over(bench)).state != run_pb2.RUN_STATE_FAILED
    run = await taken_over(bench)
    assert run.state == run_pb2.RUN_STATE_FAILED
    assert "taken over 2 times" in run.reason and f"flotilla run resume {RUN}" in run.reason
    (listed,) = await bench.runs.list(0)
    assert (listed.state, listed.reason) == (run.state, run.reason)
    assert (await bench.ledger.get_run(RUN)).reason == run.finding


async def test_a_user_who_resumes_a_run_lets_it_be_taken_over_again(bench: Bench) -> None:
    await bench.left(RunState.RUNNING)
    for _ in range(3):
        run = await taken_over(bench)
    assert run.state == run_pb2.RUN_STATE_FAILED
    await bench.runs.resume(RUN, "", "r1")
    assert await bench.ledger.takeovers(RUN) == 0
    await bench.ledger.update_run(RUN, state=RunState.RUNNING)
    for _ in range(2):
        assert (await taken_over(bench)).state != run_pb2.RUN_STATE_FAILED
    assert (await taken_over(bench)).state == run_pb2.RUN_STATE_FAILED


@pytest.mark.parametrize("has_samples", [True, False])
async def test_deaths_with_a_step_in_between_never_count(bench: Bench, has_samples: bool) -> None:
    await bench.left(RunState.RUNNING)
    done: dict[str, Any] = {"result": Version(4, 2), "step": 2, "cursor": None}
    for _ in range(4):
        assert (await taken_over(bench)).state != run_pb2.RUN_STATE_FAILED
        # Made again after a fall-back: the number of steps is the one that it was.
        if has_samples:
            await bench.ledger.passed_by(RUN, [], DropReason.UNIFORM, **done)
        else:
            await bench.ledger.went_on(RUN, **done)


@pytest.mark.parametrize("config", [CONFIG, CONFIG + "resume: by_user\n"], ids=["goes on", "is closed"])
async def test_a_step_of_a_killed_coordinator_has_its_metrics(bench: Bench, config: str) -> None:
    await bench.left(RunState.RUNNING, config)
    bench.directory.write_metrics(1, {"reward/mean": 0.25}, lineage=4)
    known = {"reward/mean": 0.5, "loss": math.nan, "canary/mean": 1e-7}
    await bench.ledger.went_on(RUN, result=Version(4, 3), step=3, cursor=None, metrics=known)
    run = await taken_over(bench)
    assert (run.step, run.metrics["reward/mean"]) == (3, 0.5)
    await taken_over(bench)
    told = [json.loads(line) for line in (bench.directory.path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["lineage"], line["reward/mean"]) for line in told] == [
        (1, 4, 0.25),
        (2, 4, 0.5),
    ]
    assert told[-1]["canary/mean"] == 1e-7 and told[-1]["loss"] is None


async def test_metrics_of_steps_that_a_fall_back_undid_stand_for_none_of_a_killed_coordinator(
    bench: Bench,
) -> None:
    await bench.left(RunState.RUNNING)
    for step in range(1, 4):
        bench.directory.write_metrics(step, {"reward/mean": 0.25}, lineage=4)
    await bench.ledger.went_on(RUN, result=Version(4, 4), step=4, cursor=None, metrics={"reward/mean": 0.25})
    await bench.ledger.fall_back(RUN, Version(5, 2), step=2, cursor=None)
    await taken_over(bench)
    assert dict(bench.directory.read_metrics()).keys() == {1, 2, 3}, "until they are made again"
    await bench.ledger.went_on(RUN, result=Version(5, 3), step=3, cursor=None, metrics={"reward/mean": 0.5})
    await taken_over(bench)
    assert dict(bench.directory.read_metrics()) == {1: {"reward/mean": 0.25}, 2: {"reward/mean": 0.5}}


async def test_who_watches_a_run_is_told_of_a_step_that_a_killed_coordinator_did_not_end(
    bench: Bench,
) -> None:
    await bench.left(RunState.RUNNING)
    await bench.ledger.went_on(RUN, result=Version(4, 3), step=3, cursor=None, metrics={"reward/mean": 0.5})
    await taken_over(bench)
    steps = [event["step"] for event in bench.directory.read_events() if "step" in event]
    assert steps == [{"step": "3", "metrics": {"reward/mean": 0.5}}]


async def test_a_run_whose_directory_is_gone_keeps_no_other_run_from_going_on(bench: Bench) -> None:
    await bench.left(RunState.RUNNING, CONFIG + "resume: by_user")
    await bench.ledger.went_on(RUN, result=Version(4, 3), step=3, cursor=None, metrics={"reward/mean": 0.5})
    bench.directory.path.rmdir()
    assert (await taken_over(bench)).state == run_pb2.RUN_STATE_FAILED


async def test_a_paused_run_is_taken_over_however_often(bench: Bench) -> None:
    await bench.left(RunState.PAUSED)
    for _ in range(4):
        assert (await taken_over(bench)).state != run_pb2.RUN_STATE_FAILED


async def test_a_takeover_counts_before_anything_of_the_run_is_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan alone of a run may kill its coordinator."""
    counted = []

    def plan(*_: Any) -> run_pb2.Plan:
        with sqlite3.connect(bench.directory.path.parents[1] / "ledger.sqlite") as db:
            counted.extend(db.execute("SELECT takeovers FROM runs").fetchone())
        return run_pb2.Plan()

    monkeypatch.setattr(start, "plan_run", plan)
    await bench.left(RunState.RUNNING)
    await taken_over(bench)
    assert counted == [1]


async def test_a_stored_run_that_asks_for_too_much_is_refused_with_the_key(bench: Bench) -> None:
    await bench.left(RunState.RUNNING, CONFIG + "rollout: {prompts_per_step: 1000000000}\n")
    run = await taken_over(bench)
    assert run.state == run_pb2.RUN_STATE_FAILED
    assert "rollout.prompts_per_step" in run.reason and "less than or equal to 100000" in run.reason
    with pytest.raises(InvalidConfig, match=r"rollout\.prompts_per_step"):
        await bench.runs.resume(RUN, "", "r1")


async def test_a_run_that_had_ended_when_its_coordinator_died_ends_as_it_did(bench: Bench) -> None:
    """The outcome is written before the ledger has the end."""
    await bench.left(RunState.RUNNING)
    outcome = run_pb2.Run(
        run_id=RUN, state=run_pb2.RUN_STATE_SUCCEEDED, step=3, directory=str(bench.directory.path)
    )
    bench.directory.finish(outcome)
    assert (await taken_over(bench)).state == run_pb2.RUN_STATE_SUCCEEDED and bench.launched == []
    record = await bench.ledger.get_run(RUN)
    assert (record.state, record.step) == (RunState.SUCCEEDED, 3)
    assert (bench.directory.path / "logs").is_dir(), "what was left of the end is made up"


async def test_nothing_is_answered_before_it_is_known_which_runs_go_on(bench: Bench) -> None:
    await bench.left(RunState.RUNNING)
    runs = Runs(bench.runs.host, Fleet(bench.runs.host, lambda: True), bench.ledger, bench.runs.events)
    asked = asyncio.create_task(runs.find(RUN))
    await asyncio.wait({asked}, timeout=0.05)
    assert not asked.done()
    await runs.recover()
    assert (await asked).state != run_pb2.RUN_STATE_FAILED
    await runs.close()
