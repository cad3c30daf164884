"""What is known of a run that has ended, from its files: without memory, without its coordinator, without a fleet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_testing.runs import unknown_metrics
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(120)

STEPS = 3
TinyRun = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def run_file(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_run("on-disk", STEPS)))
    return file


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


def test_without_a_fleet_runs_are_listed_shown_and_planned(
    fleet: Stack, ended: dict[str, Any], run_file: Path
) -> None:
    asked = fleet.ok("run", "list")
    planned = fleet.ok("run", "plan", str(run_file))
    fleet.ok("down")

    listed = fleet.flotilla("run", "list", "--json")
    assert listed.json == asked
    assert "no fleet is running: read from" in listed.err
    shown = fleet.ok("run", "show", ended["run_id"])
    assert (shown["state"], shown["metrics"]) == ("succeeded", ended["metrics"])
    assert fleet.ok("run", "plan", str(run_file)) == planned
    assert fleet.flotilla("run", "show", "no-such-run").code == 2
    assert fleet.flotilla("run", "stop", "latest").code == 3
