"""What is known of a run that has ended, from its files: without memory, without its coordinator, without a fleet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla_testing.runs import unknown_metrics, written
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(120)

STEPS = 3
TinyRun = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def run_file(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("run"), tiny_run("on-disk", STEPS))


@pytest.fixture(scope="module")
def ended(fleet: Stack, run_file: Path) -> dict[str, Any]:
    run = fleet.run(run_file)
    assert run["state"] == "succeeded", run["reason"]
    return run


def test_an_ended_run_is_watched_from_its_file(fleet: Stack, ended: dict[str, Any]) -> None:
    watched = fleet.flotilla("run", "watch", ended["run_id"])
    assert watched.code == 0, watched.err
    for told in ("starting weights: ", f"step 1/{STEPS}", f"step {STEPS}/{STEPS}"):
        assert watched.err.count(told) == 1, watched.err
    assert fleet.ok("run", "show", ended["run_id"])["metrics"] == ended["metrics"]


def test_a_run_writes_no_metric_that_the_table_lacks(fleet: Stack, ended: dict[str, Any]) -> None:
    lines = fleet.metrics(ended)
    assert len(lines) == STEPS
    assert unknown_metrics(lines) == set()


def test_stopping_an_ended_run_is_no_error(fleet: Stack, ended: dict[str, Any]) -> None:
    stopped = fleet.flotilla("run", "stop", "latest")
    assert stopped.code == 0
    assert f"{ended['run_id']} has ended already (succeeded)" in stopped.err


def test_a_killed_coordinator_leaves_an_outcome_and_plots(fleet: Stack, run_file: Path) -> None:
    run = fleet.ok("run", "start", str(run_file), "steps=20000", "resume=by_user")
    wait_until("the first steps", lambda: len(fleet.metrics(run)) >= STEPS, 60)
    fleet.process("coordinator").kill()
    wait_until("the coordinator's return", fleet.answers, 60)

    wait_until("the end of the run", lambda: fleet.state(run) == "failed", 30)
    shown = fleet.ok("run", "show", run["run_id"])
    # The ledger knows an update before the step's line is written.
    assert shown["step"] - len(fleet.metrics(run)) in (0, 1)
    assert "the coordinator stopped" in shown["reason"]
    directory = Path(run["directory"])
    # Calls are answered while the report is still being drawn.
    wait_until("the last plot", (directory / "plots" / "time.png").exists, 30)
    assert json.loads((directory / "outcome.json").read_text())["state"] == "RUN_STATE_FAILED"
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert events[-1]["run"]["state"] == "RUN_STATE_FAILED"
    assert [int(event["sequence"]) for event in events] == list(range(1, len(events) + 1))


def test_services_are_the_same_whether_the_coordinator_answers_or_hangs(fleet: Stack, run_file: Path) -> None:
    """But for what the coordinator alone knows: services from elsewhere, what a run has given to each, and its jail."""
    run = fleet.ok("run", "start", str(run_file), "steps=20000", "resume=by_user")

    def rows() -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in fleet.ok("ps")["processes"]}

    wait_until("the first version", lambda: rows()["generator-0"]["policy_version"] is not None, 60)
    answered = rows()
    with stopped(fleet.process("coordinator")):
        hung = rows()
    fleet.ok("run", "stop", run["run_id"])
    wait_until("the record of its end", (Path(run["directory"]) / "outcome.json").exists, 60)
    assert answered.keys() - hung.keys() == {"trainer"}, "no launcher started it: it has registered itself"
    for name, row in hung.items():
        # A run gives a generator its version and leases it; only a coordinator has runs, and registrations.
        of_run = {key: row[key] for key in ("policy_version", "run_id", "asleep", "isolation")}
        assert of_run == {"policy_version": None, "run_id": None, "asleep": False, "isolation": None}
        assert json.dumps(answered[name] | of_run) == json.dumps(row)


def test_each_question_has_the_same_answer_with_a_coordinator_and_without(
    fleet: Stack, ended: dict[str, Any], run_file: Path, tmp_path: Path
) -> None:
    run_id, trace = ended["run_id"], tmp_path / "trace.json"
    questions = (
        ("run", "list"),
        ("run", "show", run_id),
        ("run", "show", "latest"),
        ("run", "compare", run_id, "latest"),
        ("run", "plan", str(run_file)),
        ("samples", run_id, "-n", "1000"),
        ("samples", "latest", "-n", "1000", "--sort", "reward", "--reverse", "--step", "0"),
        ("samples", "latest", "--state", "dropped", "-n", "7"),
    )
    timelines = (
        ("timeline", run_id),
        ("timeline", run_id, "--step", "1"),
        ("timeline", "latest", "--step", "0"),
    )
    wait_until("the samples of the last checkpoint", lambda: is_durable(fleet, run_id))
    answers = [answer(fleet, question) for question in questions]
    traces = []
    for question in timelines:
        told = fleet.ok(*question, "-o", str(trace))
        # Who answered is what `source` is there to say.
        assert told.pop("source") == "coordinator"
        traces.append((told, trace.read_bytes()))
    fleet.ok("down")

    for question, asked in zip(questions, answers, strict=True):
        assert answer(fleet, question) == asked, f"flotilla {' '.join(question)}"
    for question, asked in zip(timelines, traces, strict=True):
        told = fleet.ok(*question, "-o", str(trace))
        assert told.pop("source") == "spans.sqlite" and (told, trace.read_bytes()) == asked
    samples = json.loads(answers[5])["samples"]
    assert len(samples) == STEPS * 4
    for key in ("answer", "info", "reward_parts"):
        assert all(one[key] is not None for one in samples), key
    assert "no fleet is running: read from" in fleet.flotilla("run", "list").err
    assert fleet.flotilla("run", "show", "no-such-run").code == 2
    assert fleet.flotilla("timeline", "no-such-run", "-o", str(tmp_path / "none.json")).code == 2
    assert not (tmp_path / "none.json").exists()
    # A stack that is down has no services, so nobody knows what they would do or hold.
    for question in (("run", "stop", "latest"), ("replicas", "list"), ("weights", "show")):
        assert fleet.flotilla(*question).code == 3


def answer(fleet: Stack, question: tuple[str, ...]) -> str:
    outcome = fleet.flotilla(*question, "--json")
    assert outcome.code == 0, outcome.err
    return outcome.out


def is_durable(fleet: Stack, run_id: str) -> bool:
    return {one["state"] for one in fleet.ok("samples", run_id, "-n", "1000")["samples"]} == {"durable"}


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A process that answers nothing in between."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()
