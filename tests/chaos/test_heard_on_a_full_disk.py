"""The disk of a stack is full: its run says so and waits, and does meanwhile what its user says.

Simulated engine, accepting trainer, everything else real. `test_full_disk.py` strikes at random moments.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla.coordinator.v1 import run_pb2
from flotilla_core.errors import FlotillaError
from flotilla_testing.coordinator_faults import endless_run
from flotilla_testing.small_disk import LIMIT_S, STEPS, RunOnDisk, SmallDisk
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def run(
    fleet: Stack, disk: SmallDisk, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunOnDisk:
    """It goes on from one test to the next, the last of which ends it."""
    file = endless_run(arithmetic, tmp_path_factory.mktemp("run"), 1)
    started = RunOnDisk(fleet, disk, fleet.ok("run", "start", str(file), STEPS))
    wait_until("two steps", lambda: started.steps >= 2, LIMIT_S)
    return started


def test_a_full_disk_is_told_wherever_a_user_looks_and_the_run_goes_on_by_itself(
    run: RunOnDisk, fleet: Stack, disk: SmallDisk
) -> None:
    run.fill()
    shown = fleet.ok("run", "show", run.run["run_id"])
    assert shown["state"] == "paused" and shown["phase"] == "wait for disk space"
    assert str(disk.path) in shown["reason"]
    (waiting,) = fleet.ok("ps")["waiting"]
    assert waiting["run_id"] == run.run["run_id"] and str(disk.path) in waiting["reason"]
    doctor = fleet.flotilla("doctor")
    assert doctor.code == 5 and str(disk.path) in doctor.out and "FAIL  state directory" in doctor.out, (
        doctor.out
    )
    run.free()
    assert_accounted_for(run.fleet, run.run["run_id"])
    events = (Path(run.run["directory"]) / "events.jsonl").read_text()
    assert "continues by itself when the disk has room" in events and "the disk has room again" in events


def test_a_pause_and_its_end_are_heard_while_the_disk_is_full(
    run: RunOnDisk, fleet: Stack, disk: SmallDisk
) -> None:
    run.fill()
    with fleet.client() as client:
        assert client.pause_run(run.run["run_id"]).state == run_pb2.RUN_STATE_PAUSED
    disk.free()
    wait_until("the user's pause", lambda: run.now().phase == "paused", LIMIT_S)
    disk.fill()
    with fleet.client() as client:
        client.resume_run(run.run["run_id"])
    run.fill()
    with fleet.client() as client:
        assert client.resume_run(run.run["run_id"]).phase == "wait for disk space"
    run.free()
    assert_accounted_for(run.fleet, run.run["run_id"])


def test_a_run_that_waits_for_disk_space_outlives_its_coordinator(
    run: RunOnDisk, fleet: Stack, disk: SmallDisk
) -> None:
    run.fill()
    before, former = run.steps, fleet.process("coordinator")
    former.kill()
    wait_until("the coordinator's end", lambda: not former.is_running(), LIMIT_S)
    run.free()
    steps = [step["step"] for step in fleet.metrics(run.run)]
    # The line of a step that the disk did not take died with the coordinator; no step was made twice.
    assert steps == sorted(set(steps)) and len(steps) > before
    assert_accounted_for(run.fleet, run.run["run_id"])


def test_a_run_stops_when_told_while_the_disk_is_full(run: RunOnDisk, fleet: Stack, disk: SmallDisk) -> None:
    run.fill()
    run_id = run.run["run_id"]
    with fleet.client() as client:
        assert client.stop_run(run_id, "enough").state == run_pb2.RUN_STATE_STOPPING
        wait_until("the stop", lambda: run.now().state == run_pb2.RUN_STATE_STOPPED, LIMIT_S)
        with pytest.raises(FlotillaError):
            client.stop_run(run_id, "again")
        with pytest.raises(FlotillaError):
            client.resume_run(run_id)
    watched = fleet.flotilla("run", "watch", run_id)
    assert watched.code == 0 and "stopped: enough" in watched.err
    disk.free()
    recorded = Path(run.run["directory"]) / "outcome.json"
    wait_until("the record of the end", recorded.exists, LIMIT_S)
    assert fleet.ok("run", "show", run_id)["state"] == "stopped"
    assert_accounted_for(run.fleet, run.run["run_id"])
