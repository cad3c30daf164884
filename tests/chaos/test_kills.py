"""A coordinator that is killed in the middle of its work is back by itself, and nothing is lost."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla_coordinator.records.directory import RunDirectory
from flotilla_testing.coordinator_faults import endless_run, is_new, signal_inside
from flotilla_testing.stack import FLOTILLA, Stack, wait_until

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0
COORDINATOR_PHASES = ("train", "evaluate")
"""The fault matrix meets the others."""


async def test_a_killed_coordinator_is_back_in_the_loop_and_nothing_is_lost_or_trained_twice(
    quick: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    run = quick.ok("run", "start", str(endless_run(arithmetic, tmp_path, 1)))
    followed = tmp_path / "watch.log"
    with followed.open("wb") as log:
        watching = subprocess.Popen(
            [FLOTILLA, "run", "watch", run["run_id"], "--stack", str(quick.file)], stdout=log, stderr=log
        )
    # A command that finds no coordinator at its start ends at once.
    wait_until("the run is followed", lambda: followed.stat().st_size > 0, WAIT_S)
    wait_until("the first step", lambda: len(quick.metrics(run)) >= 1, WAIT_S)
    for phase in COORDINATOR_PHASES:
        pid = quick.process("coordinator").pid
        done = len(quick.metrics(run))
        await signal_inside(quick, run["run_id"], phase, signal.SIGKILL)
        wait_until(f"a new coordinator after {phase}", lambda pid=pid: is_new(quick, pid), WAIT_S)
        wait_until(f"two steps after {phase}", lambda done=done: len(quick.metrics(run)) >= done + 2, WAIT_S)
    quick.ok("run", "stop", run["run_id"])
    assert watching.wait(WAIT_S) == 0, followed.read_text()
    assert quick.state(run) == "stopped"

    assert_accounted_for(quick, run["run_id"])
    directory = RunDirectory(Path(run["directory"]))
    steps = [step for step, _ in directory.read_metrics()]
    assert steps == list(range(len(steps)))
    assert [evaluation["step"] for evaluation in directory.read_evaluations()] == list(range(len(steps) + 1))
    lines = quick.metrics(run)
    assert {line["lineage"] for line in lines} == {0}, "the trainer lived: nothing goes back to a checkpoint"
    assert all("reward/mean" in line for line in lines)
    said = followed.read_text()
    assert "does not answer" in said and "is back" in said
