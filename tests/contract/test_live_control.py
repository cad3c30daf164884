"""A run and its fleet are looked at and changed while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accounts import assert_accounted_for

from flotilla_testing.runs import written
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(400)

USAGE = 2
PREFLIGHT = 5
WAIT_S = 120.0


@pytest.fixture(scope="module")
def endless(
    fleet: Stack, tiny_run: Callable[[str, int], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """A run of small steps that goes on until the last test ends it, and accounts for every sample then."""
    file = written(tmp_path_factory.mktemp("endless"), tiny_run("endless", 100_000))
    run = fleet.ok("run", "start", str(file))
    wait_until("the first step", lambda: len(fleet.metrics(run)) >= 1, WAIT_S)
    yield run
    fleet.flotilla("run", "stop", run["run_id"])
    wait_until("the end of the run", lambda: fleet.state(run) in ("stopped", "succeeded"), WAIT_S)
    assert_accounted_for(fleet, run["run_id"])


def more_steps(fleet: Stack, run: dict[str, Any], count: int) -> None:
    done = len(fleet.metrics(run))
    wait_until(f"{count} more steps", lambda: len(fleet.metrics(run)) >= done + count, WAIT_S)


def members(fleet: Stack, run: dict[str, Any]) -> float:
    return fleet.metrics(run)[-1]["sync/members"]


def test_a_drained_generator_leaves_the_run_and_stays_alive(fleet: Stack, endless: dict[str, Any]) -> None:
    fleet.ok("scale", "generator", "2")
    wait_until("two members", lambda: members(fleet, endless) == 2, WAIT_S)
    shown = fleet.ok("weights", "show")
    assert shown["run_id"] == endless["run_id"]
    assert [one["name"] for one in shown["generators"]] == ["generator-0", "generator-1"]
    assert all(len(one["digest"]) == 32 and one["bytes"] > 0 for one in shown["generators"])

    process = fleet.process("generator-1").pid
    assert fleet.ok("replicas", "drain", "generator-1")["work"] == "draining"
    wait_until("one member", lambda: members(fleet, endless) == 1, WAIT_S)
    more_steps(fleet, endless, 2)
    listed = {one["name"]: one for one in fleet.ok("replicas", "list")["replicas"]}
    assert (listed["generator-1"]["why"], listed["generator-1"]["policy_version"]) == (
        "drained by a user",
        None,
    )
    assert listed["generator-0"]["work"] == "ready" and listed["generator-0"]["run_id"] == endless["run_id"]
    assert fleet.process("generator-1").pid == process

    refused = fleet.flotilla("replicas", "drain", "generator-0")
    assert (refused.code, "the only generator" in refused.err) == (PREFLIGHT, True), refused.err
    fleet.ok("scale", "generator", "1")


def test_the_last_generator_or_reward_is_not_taken_from_a_run_by_mistake(
    fleet: Stack, endless: dict[str, Any]
) -> None:
    for kind in ("generator", "reward"):
        refused = fleet.flotilla("scale", kind, "0")
        assert refused.code == USAGE
        assert endless["run_id"] in refused.err and "--yes" in refused.err
    more_steps(fleet, endless, 1)


def test_a_paused_run_keeps_the_fleet_and_goes_on_where_it_was(fleet: Stack, endless: dict[str, Any]) -> None:
    run_id = endless["run_id"]
    fleet.ok("run", "pause", run_id)
    wait_until("the pause", lambda: fleet.state(endless) == "paused", WAIT_S)
    done = len(fleet.metrics(endless))
    assert fleet.ok("weights", "show")["run_id"] == run_id
    assert fleet.flotilla("scale", "generator", "0").code == USAGE
    fleet.ok("run", "set", run_id, "checkpoint.keep=1")
    wait_until("the change, in the pause", lambda: "checkpoint.keep 2 -> 1" in notices(endless), WAIT_S)
    assert len(fleet.metrics(endless)) == done
    fleet.ok("run", "resume", run_id)
    more_steps(fleet, endless, 2)
    assert fleet.state(endless) == "running"


def test_a_pause_and_settings_outlive_the_coordinator(fleet: Stack, endless: dict[str, Any]) -> None:
    run_id = endless["run_id"]
    fleet.ok("run", "set", run_id, "steps=90000")
    fleet.ok("run", "pause", run_id)
    wait_until("the pause", lambda: fleet.state(endless) == "paused", WAIT_S)
    done = len(fleet.metrics(endless))
    fleet.process("coordinator").kill()
    wait_until("the next coordinator", fleet.answers, WAIT_S)
    wait_until("the pause under it", lambda: fleet.ok("run", "show", run_id)["phase"] == "paused", WAIT_S)
    shown = fleet.ok("run", "show", run_id)
    assert (shown["state"], shown["total_steps"], len(fleet.metrics(endless))) == ("paused", 90_000, done)
    fleet.ok("run", "resume", run_id)
    more_steps(fleet, endless, 2)


def test_settings_change_between_two_steps_and_are_told(fleet: Stack, endless: dict[str, Any]) -> None:
    run_id = endless["run_id"]
    refused = fleet.flotilla("run", "set", run_id, "rollout.prompts_per_step=4")
    assert (refused.code, "optimizer.learning_rate" in refused.err) == (USAGE, True), refused.err
    fleet.ok("run", "set", run_id, "optimizer.learning_rate=0.125", "rollout.max_staleness=1")
    wait_until("the new rate", lambda: fleet.metrics(endless)[-1]["learning_rate"] == 0.125, WAIT_S)
    wait_until("older samples", lambda: fleet.metrics(endless)[-1]["staleness/max"] == 1, WAIT_S)
    fleet.ok("run", "set", run_id, "rollout.max_staleness=0")
    wait_until("fresh samples", lambda: fleet.metrics(endless)[-1]["staleness/max"] == 0, WAIT_S)
    last = len(fleet.metrics(endless)) + 20
    fleet.ok("run", "set", run_id, f"steps={last}")
    wait_until("the end of the run", lambda: fleet.state(endless) == "succeeded", WAIT_S)
    assert len(fleet.metrics(endless)) == last
    written = Path(endless["directory"]).glob("run-*.yaml")
    assert last in [yaml.safe_load(file.read_text())["steps"] for file in written]
    assert "rollout.max_staleness 1 -> 0" in notices(endless)


def notices(run: dict[str, Any]) -> str:
    return Path(run["directory"], "events.jsonl").read_text()
