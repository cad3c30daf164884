from __future__ import annotations

from pathlib import Path

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs import events as module
from flotilla_coordinator.runs.events import past_events
from flotilla_coordinator.runs.status import record_end
from flotilla_coordinator.views.runs import interrupted_run, stored_run

RUN = "run-1"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Three steps, each with its event; nothing says how it ended."""
    found = RunDirectory.create(tmp_path / RUN)
    for step in range(3):
        metrics = {"reward/mean": step / 4}
        found.write_metrics(step, metrics)
        event = run_pb2.RunEvent(sequence=step + 1, step=run_pb2.StepMetrics(step=step + 1, metrics=metrics))
        found.write_event(event)
    found.write_evaluation(0, "0.0", 0.125)
    found.write_evaluation(3, "0.3", 0.5, {"eval/pass@2": 0.75})
    return found


def record(directory: RunDirectory, state: RunState = RunState.RUNNING) -> RunRecord:
    return RunRecord(RUN, "run", state, "", str(directory.path), 0.0)


def closed(directory: RunDirectory) -> run_pb2.Run:
    run = interrupted_run(record(directory))
    record_end(run)
    return run


async def told(run: run_pb2.Run, after: int) -> list[tuple[int, str | None]]:
    return [(event.sequence, event.WhichOneof("event")) async for event in past_events(run, after)]


async def test_a_watcher_gets_what_it_has_not_seen_and_then_the_end(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVENTS_AT_ONCE", 1)
    run = closed(directory)
    assert await told(run, 0) == [(1, "step"), (2, "step"), (3, "step"), (4, "run")]
    assert await told(run, 2) == [(3, "step"), (4, "run")]


async def test_an_end_that_its_file_lacks_is_told_all_the_same(directory: RunDirectory) -> None:
    assert await told(interrupted_run(record(directory)), 3) == [(3, "run")]


async def test_half_a_line_of_a_killed_process_hides_nothing_else(directory: RunDirectory) -> None:
    with (directory.path / "events.jsonl").open("a") as file:
        file.write('{"sequence": "4", "sto\n')
    assert await told(closed(directory), 0) == [
        (1, "step"),
        (2, "step"),
        (3, "step"),
        (4, "run"),
    ]


def test_an_interrupted_run_keeps_its_steps_and_accuracies(directory: RunDirectory) -> None:
    run = closed(directory)
    assert (run.state, run.step) == (run_pb2.RUN_STATE_FAILED, 3)
    assert run.metrics["reward/mean"] == 0.5
    assert (run.metrics["eval/accuracy_before"], run.metrics["eval/accuracy"]) == (0.125, 0.5)
    assert run.metrics["eval/step"] == 3
    assert run.metrics["eval/pass@2"] == 0.75
    assert run.HasField("ended_at") and "coordinator stopped" in run.reason
    assert directory.read_outcome() == run
    assert (directory.path / "plots" / "reward.png").exists()


def test_an_outcome_that_is_damaged_takes_no_metrics_with_it(directory: RunDirectory) -> None:
    (directory.path / "outcome.json").write_text('{"run_id": "ru')
    run = stored_run(record(directory, RunState.SUCCEEDED))
    assert (run.state, run.step, run.metrics["reward/mean"]) == (run_pb2.RUN_STATE_SUCCEEDED, 3, 0.5)


def test_a_directory_that_is_gone_keeps_no_coordinator_from_starting(tmp_path: Path) -> None:
    gone = RunDirectory(tmp_path / "gone")
    assert closed(gone).state == run_pb2.RUN_STATE_FAILED
