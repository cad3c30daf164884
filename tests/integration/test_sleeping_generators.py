"""Generators that sleep during updates: every step has its turns, and nobody is left asleep."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accounts import assert_accounted_for

from flotilla_testing.coordinator_faults import endless_run, is_new, signal_inside
from flotilla_testing.runs import QUICK, small_run
from flotilla_testing.stack import Stack, accepting_trainer, running_stack, wait_until

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0
UPDATE_S = 0.5


@pytest.fixture(scope="module")
def turns(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two simulated engines that sleep while a trainer accepts."""
    directory = tmp_path_factory.mktemp("turns")
    generator = {
        "engine": "sim",
        "replicas": 2,
        "sleep_while_training": True,
        "sim": {"seconds_per_token": 0.02},
    }
    description: dict[str, Any] = {
        "name": "turns",
        "model": str(arithmetic / "model"),
        "placement": "colocated",
        "generator": generator,
        "trainer": {"replicas": 0},
        "restart_budget": 1000,
    }
    with (
        running_stack(description, directory) as stack,
        accepting_trainer("trainer", stack.file, directory, UPDATE_S),
    ):
        yield stack


def short_run(arithmetic: Path, file: Path) -> Path:
    """Return the file of three steps without a canary and an export: a simulated engine computes no model."""
    file.write_text(yaml.safe_dump(yaml.safe_load(small_run(arithmetic, file).read_text()) | QUICK))
    return file


def asleep(stack: Stack) -> int:
    """Count the generators that sleep."""
    with stack.client() as client:
        return sum(service.asleep for service in client.list_services())


def assert_every_step_had_its_turns(stack: Stack, run: dict[str, Any]) -> None:
    steps = stack.metrics(run)
    assert len(steps) == 3
    for step in steps:
        assert 0 < step["time/sleep_s"] + step["time/wake_s"] < step["time/train_s"]
    assert not asleep(stack)
    assert_accounted_for(stack, run["run_id"])


async def test_a_coordinator_that_dies_while_they_sleep_leaves_them_to_its_successor_and_the_turns_of_the_next_run(
    turns: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    run = turns.ok("run", "start", str(endless_run(arithmetic, tmp_path, 0)))
    wait_until("generators that sleep", lambda: asleep(turns) == 2, WAIT_S)
    pid, done = turns.process("coordinator").pid, len(turns.metrics(run))
    await signal_inside(turns, run["run_id"], "train", signal.SIGKILL)
    wait_until("a new coordinator", lambda: is_new(turns, pid), WAIT_S)
    wait_until("two further steps", lambda: len(turns.metrics(run)) >= done + 2, WAIT_S)
    turns.stop_run(run, WAIT_S)
    assert_accounted_for(turns, run["run_id"])
    following = turns.run(short_run(arithmetic, tmp_path / "short.yaml"))
    assert following["state"] == "succeeded", following["reason"]
    assert_every_step_had_its_turns(turns, following)


def test_samples_of_a_run_with_staleness_stand_still_in_updates_and_all_of_them_are_trained(
    turns: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    file = short_run(arithmetic, tmp_path / "run.yaml")
    run = turns.run(file, "rollout.max_staleness=1")
    assert run["state"] == "succeeded", run["reason"]
    assert_every_step_had_its_turns(turns, run)
