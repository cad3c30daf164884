"""A coordinator dies or sleeps, and another takes its place: its runs go on, the ledger balances.

Those that die, or sleep alone, are in the matrix (`test_fault_matrix.py`). Simulated engines and a trainer that
accepts, behind the real coordinator, ledger, weight group and launcher.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR, SERVICE_KIND_TRAINER
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_testing.coordinator_faults import endless_run, signal_inside
from flotilla_testing.stack import Stack, accepting_trainer, light_stack, wait_until

pytestmark = pytest.mark.timeout(900)

COORDINATOR = str(Path(sys.executable).parent / "flotilla-coordinator")


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Everything takes a moment, so that each phase can be met."""
    directory = tmp_path_factory.mktemp("coordinators")
    sim = {"seconds_per_token": 0.02, "commit_s": 0.1}
    with light_stack(arithmetic / "model", directory, sim=sim, trainer_s=0.1) as running:
        yield running


async def test_a_coordinator_that_slept_while_another_took_its_place_does_no_harm(
    fleet: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    run = fleet.ok("run", "start", str(endless_run(arithmetic, tmp_path, 1)))
    wait_until("two steps", lambda: len(fleet.metrics(run)) >= 2)
    sleeper = fleet.process("coordinator")
    await signal_inside(fleet, run["run_id"], "train", signal.SIGSTOP)
    other, address = _other_coordinator(fleet, tmp_path / "other.log")
    try:
        done = len(fleet.metrics(run))
        wait_until("steps of the other coordinator", lambda: len(fleet.metrics(run)) >= done + 2)
        sleeper.resume()
        wait_until("the end of the one that slept", lambda: not sleeper.is_running())
        done = len(fleet.metrics(run))
        wait_until("more steps of the other coordinator", lambda: len(fleet.metrics(run)) >= done + 2)
        fleet.ok("run", "stop", run["run_id"], "--coordinator", address)
        shown = ["run", "show", run["run_id"], "--coordinator", address]
        wait_until("the end of the run", lambda: fleet.ok(*shown)["state"] == "stopped")
    finally:
        other.terminate()
        other.wait(60)
    assert_accounted_for(fleet, run["run_id"])
    steps = [step for step, _ in RunDirectory(Path(run["directory"])).read_metrics()]
    assert steps == list(range(len(steps)))


def test_two_runs_go_on_with_the_services_that_they_had_when_their_coordinator_dies(
    fleet: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    wait_until("a coordinator", fleet.answers)
    with accepting_trainer("trainer-1", fleet.file, tmp_path, 0.1), fleet.client() as client:
        client.scale(SERVICE_KIND_GENERATOR, 3)
        wait_until("the second trainer", lambda: len(fleet.holders(SERVICE_KIND_TRAINER)) == 2)
        file = endless_run(arithmetic, tmp_path, 1)
        runs = [fleet.ok("run", "start", str(file)) for _ in range(2)]
        for run, members in zip(runs, (2, 1), strict=True):
            wait_until(
                f"a step with {members} generators",
                lambda run=run, members=members: (
                    [step["sync/members"] for step in fleet.metrics(run)[-1:]] == [members]
                ),
            )
        had = [fleet.holders(kind) for kind in (SERVICE_KIND_TRAINER, SERVICE_KIND_GENERATOR)]
        done = [len(fleet.metrics(run)) for run in runs]
        fleet.process("coordinator").kill()
        for run, steps in zip(runs, done, strict=True):
            wait_until("more steps", lambda run=run, steps=steps: len(fleet.metrics(run)) >= steps + 3)
        assert [fleet.holders(kind) for kind in (SERVICE_KIND_TRAINER, SERVICE_KIND_GENERATOR)] == had
        for run in runs:
            fleet.stop_run(run, 60.0)
            assert fleet.ok("run", "show", run["run_id"])["policy_version"].startswith("0."), (
                "a session was lost"
            )
            assert_accounted_for(fleet, run["run_id"])
        fleet.ok("scale", "generator", "1")


def _other_coordinator(fleet: Stack, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Started by hand beside the one that sleeps; refused as long as that one may only be slow."""
    announced = fleet.directory / "instances" / "coordinator-b.json"
    command = [COORDINATOR, "--name", "coordinator-b", "--stack", str(fleet.file), "--port", "0"]
    refusals = 0
    while True:
        with log.open("ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        wait_until("its start", lambda process=process: announced.exists() or process.poll() is not None)
        if process.poll() is None:
            assert refusals, "a coordinator took a ledger over whose owner had just spoken"
            return process, str(json.loads(announced.read_text())["address"])
        assert "belongs to another coordinator" in log.read_text()
        refusals += 1
