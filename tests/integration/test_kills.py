"""A coordinator or a replica that is killed in the middle of its work is back by itself, and nothing is lost.

Simulated engines, so that a death costs seconds; test_replicas.py has one of vLLM.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.rundir import RunDirectory
from flotilla_testing.coordinator_faults import endless_run, is_new, signal_inside
from flotilla_testing.replica_faults import PHASES, kill_inside, wait_for_work
from flotilla_testing.stack import FLOTILLA, Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0
COORDINATOR_PHASES = ("train", "evaluate")
"""The others are met in tests/chaos."""
VICTIM = "generator-1"


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Everything takes a moment, so that each phase can be met."""
    directory = tmp_path_factory.mktemp("kills")
    sim = {"seconds_per_token": 0.02, "commit_s": 0.1}
    with light_stack(arithmetic / "model", directory, replicas=2, sim=sim, trainer_s=0.1) as running:
        yield running


async def test_a_killed_coordinator_is_back_in_the_loop_and_nothing_is_lost_or_trained_twice(
    fleet: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    run = fleet.ok("run", "start", str(endless_run(arithmetic, tmp_path, 1)))
    followed = tmp_path / "watch.log"
    with followed.open("wb") as log:
        watching = subprocess.Popen(
            [FLOTILLA, "run", "watch", run["run_id"], "--stack", str(fleet.file)], stdout=log, stderr=log
        )
    wait_until("the first step", lambda: len(fleet.metrics(run)) >= 1, WAIT_S)
    for phase in COORDINATOR_PHASES:
        pid = fleet.process("coordinator").pid
        done = len(fleet.metrics(run))
        await signal_inside(fleet, run["run_id"], phase, signal.SIGKILL)
        wait_until(f"a new coordinator after {phase}", lambda pid=pid: is_new(fleet, pid), WAIT_S)
        wait_until(f"two steps after {phase}", lambda done=done: len(fleet.metrics(run)) >= done + 2, WAIT_S)
    fleet.ok("run", "stop", run["run_id"])
    assert watching.wait(WAIT_S) == 0
    assert fleet.state(run) == "stopped"

    verdict = check(fleet.directory / "ledger.sqlite", run["run_id"])
    assert verdict.passed and verdict.lost == verdict.trained_twice == 0, str(verdict)
    directory = RunDirectory(Path(run["directory"]))
    steps = [step for step, _ in directory.read_metrics()]
    assert steps == list(range(len(steps)))
    assert [evaluation["step"] for evaluation in directory.read_evaluations()] == list(range(len(steps) + 1))
    lines = fleet.metrics(run)
    assert {line["lineage"] for line in lines} == {0}, "the trainer lived: nothing goes back to a checkpoint"
    said = followed.read_text()
    assert "does not answer" in said and "is back" in said


async def test_a_replica_killed_at_any_phase_loses_no_sample(
    fleet: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    run = fleet.ok("run", "start", str(endless_run(arithmetic, tmp_path, 0)), "weights.timeout_s=20")
    for phase in PHASES:
        wait_for_work(fleet, run, VICTIM)
        await kill_inside(fleet, VICTIM, phase)
    wait_for_work(fleet, run, VICTIM)
    fleet.ok("run", "stop", run["run_id"])
    wait_until("the end of the run", lambda: fleet.state(run) == "stopped", WAIT_S)
    verdict = check(fleet.directory / "ledger.sqlite", run["run_id"])
    assert verdict.passed and verdict.lost == verdict.trained_twice == 0, str(verdict)
