"""What is known of a run that has ended, from its files: without memory, without its coordinator, without a fleet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(120)

STEPS = 3
SmallRun = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def own_fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A light fleet that a test may take down."""
    with light_stack(arithmetic / "model", tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture(scope="module")
def run_file(small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text(yaml.safe_dump(small_run("on-disk", STEPS)))
    return file


@pytest.fixture(scope="module")
def ended(own_fleet: Stack, run_file: Path) -> dict[str, Any]:
    run = own_fleet.run(run_file)
    assert run["state"] == "succeeded", run["reason"]
    return run


def test_an_ended_run_is_watched_from_its_file(own_fleet: Stack, ended: dict[str, Any]) -> None:
    watched = own_fleet.flotilla("run", "watch", ended["run_id"])
    assert watched.code == 0, watched.err
    for told in ("starting weights: ", f"step 1/{STEPS}", f"step {STEPS}/{STEPS}"):
        assert watched.err.count(told) == 1, watched.err
    assert own_fleet.ok("run", "show", ended["run_id"])["metrics"] == ended["metrics"]


def test_stopping_an_ended_run_is_no_error(own_fleet: Stack, ended: dict[str, Any]) -> None:
    stopped = own_fleet.flotilla("run", "stop", "latest")
    assert stopped.code == 0
    assert f"{ended['run_id']} has ended already (succeeded)" in stopped.err


def test_a_killed_coordinator_leaves_an_outcome_and_plots(own_fleet: Stack, run_file: Path) -> None:
    run = own_fleet.ok("run", "start", str(run_file), "steps=1000000", "resume=by_user")
    wait_until("the first steps", lambda: len(own_fleet.metrics(run)) >= STEPS, 60)
    own_fleet.process("coordinator").kill()
    wait_until("the coordinator's return", lambda: own_fleet.flotilla("run", "list").code == 0, 60)

    show = partial(own_fleet.ok, "run", "show", run["run_id"])
    wait_until("the end of the run", lambda: show()["state"] == "failed", 30)
    shown = show()
    # The ledger knows an update before the step's line is written.
    assert shown["step"] - len(own_fleet.metrics(run)) in (0, 1)
    assert "the coordinator stopped" in shown["reason"]
    directory = Path(run["directory"])
    # Calls are answered while the report is still being drawn.
    wait_until("the last plot", (directory / "plots" / "time.png").exists, 30)
    assert json.loads((directory / "outcome.json").read_text())["state"] == "RUN_STATE_FAILED"
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert events[-1]["run"]["state"] == "RUN_STATE_FAILED"
    assert [int(event["sequence"]) for event in events] == list(range(1, len(events) + 1))


def test_without_a_fleet_runs_are_listed_shown_and_planned(
    own_fleet: Stack, ended: dict[str, Any], run_file: Path
) -> None:
    asked = own_fleet.ok("run", "list")
    planned = own_fleet.ok("run", "plan", str(run_file))
    own_fleet.ok("down")

    listed = own_fleet.flotilla("run", "list", "--json")
    assert listed.json == asked
    assert "no fleet runs: read from" in listed.err
    shown = own_fleet.ok("run", "show", ended["run_id"])
    assert (shown["state"], shown["metrics"]) == ("succeeded", ended["metrics"])
    assert own_fleet.ok("run", "plan", str(run_file)) == planned
    assert own_fleet.flotilla("run", "show", "no-such-run").code == 2
    assert own_fleet.flotilla("run", "stop", "latest").code == 3
