"""A replica of vLLM comes and dies; the run goes on and loses nothing. Other phases of a death: test_kills.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.replica_faults import kill_inside
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(400)

JOINED_STEPS = 10
SAMPLES_PER_STEP = 16 * 4
REPLICA_TIMEOUT_S = 180.0
VICTIM = "generator-1"
SHARE = f"generator/{VICTIM}/samples"


@pytest.fixture
def endless_run(stack: Stack, run_file: Path) -> Iterator[dict[str, Any]]:
    """A run that goes on until the test is over."""
    run = stack.ok("run", "start", str(run_file), "steps=100000")
    wait_until("the first steps", lambda: len(stack.metrics(run)) >= 3, REPLICA_TIMEOUT_S)
    yield run
    stack.flotilla("run", "stop", run["run_id"])
    wait_until("the end of the run", lambda: _ended(stack, run), 90)


def test_joiner_delays_no_step_and_gets_its_share(
    stack: Stack, endless_run: dict[str, Any], tmp_path: Path
) -> None:
    stack.ok("scale", "generator", "2")
    wait_until(
        "ten steps with two replicas",
        lambda: len(_steps_with_victim(stack, endless_run)) >= JOINED_STEPS,
        REPLICA_TIMEOUT_S,
    )
    steps = stack.metrics(endless_run)
    first = next(i for i, step in enumerate(steps) if SHARE in step)
    share = sum(step.get(SHARE, 0.0) for step in steps[first : first + JOINED_STEPS])
    assert share >= 0.35 * JOINED_STEPS * SAMPLES_PER_STEP
    members = [step["sync/members"] for step in steps[: first + 1]]
    assert members[-2:] == [2, 2] and 2 not in members[:-2], (
        "one sync took it in, right before its first samples"
    )

    timeline = tmp_path / "timeline.json"
    stack.ok("timeline", endless_run["run_id"], "-o", str(timeline))
    assert _joins_of_the_first_replica(timeline) == 2, (
        "the run's first sync, and the one that took the joiner in"
    )


async def test_a_replica_killed_while_weights_arrive_loses_no_sample(
    stack: Stack, endless_run: dict[str, Any]
) -> None:
    stack.ok("scale", "generator", "2")
    before = len(_steps_with_victim(stack, endless_run))
    wait_until(
        "two replicas at work",
        lambda: len(_steps_with_victim(stack, endless_run)) > before,
        REPLICA_TIMEOUT_S,
    )
    await kill_inside(stack, VICTIM, "broadcast")
    done = len(stack.metrics(endless_run))
    wait_until("five more steps", lambda: len(stack.metrics(endless_run)) >= done + 5, 120)
    stack.ok("run", "stop", endless_run["run_id"])
    wait_until("the end of the run", lambda: _ended(stack, endless_run), 90)
    verdict = check(stack.directory / "ledger.sqlite", endless_run["run_id"])
    assert verdict.lost == 0 and verdict.trained_twice == 0, str(verdict)
    assert verdict.passed, str(verdict)


def _joins_of_the_first_replica(timeline: Path) -> int:
    """How often the replica that was there all along had to form a group."""
    events = json.loads(timeline.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    joins = [e for e in events if e["ph"] == "X" and e["name"].endswith("GeneratorService/JoinWeightGroup")]
    return sum(processes[join["pid"]].startswith("generator-0") for join in joins)


def _steps_with_victim(stack: Stack, run: dict[str, Any]) -> list[dict[str, float]]:
    return [step for step in stack.metrics(run) if SHARE in step]


def _ended(stack: Stack, run: dict[str, Any]) -> bool:
    return stack.state(run) in ("stopped", "failed", "succeeded")
