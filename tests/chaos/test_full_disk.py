"""The disk of a stack fills up at a random write of a run, again and again: the run pauses, says why, and goes on.

Simulated engine, accepting trainer, everything else real.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.rundir import RunDirectory
from flotilla_testing.coordinator_faults import endless_run
from flotilla_testing.small_disk import LIMIT_S, STEPS, RunOnDisk, SmallDisk, small_disk, stack_on
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(900)

STRIKES = 20


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    try:
        with small_disk(tmp_path_factory.mktemp("full") / "state") as mounted:
            yield mounted
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(disk: SmallDisk, arithmetic: Path) -> Iterator[Stack]:
    with stack_on(disk, arithmetic / "model") as running:
        yield running


def verdict(run: RunOnDisk) -> str:
    """Nothing was lost, trained twice or trained too late."""
    found = check(run.fleet.directory / "ledger.sqlite", run.run["run_id"])
    assert found.passed and found.lost == found.trained_twice == found.stale == 0, str(found)
    return str(found)


def test_a_run_on_a_full_disk_pauses_and_goes_on_by_itself_twenty_times(
    fleet: Stack, disk: SmallDisk, arithmetic: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    run = fleet.ok("run", "start", str(endless_run(arithmetic, tmp_path, 1)), STEPS)
    full = RunOnDisk(fleet, disk, run, seed)
    wait_until("two steps", lambda: full.steps >= 2, LIMIT_S)
    for strike in range(1, STRIKES + 1):
        noticed_s = full.fill()
        text = full.now().reason
        went_on_s = full.free()
        sys.stdout.write(
            f"strike {strike}: after step {full.steps}, paused in {noticed_s:.1f} s, "
            f"two more steps {went_on_s:.1f} s after space was freed, {verdict(full)}: {text}\n"
        )
    fleet.ok("run", "stop", run["run_id"])
    wait_until("the end", lambda: full.now().state == run_pb2.RUN_STATE_STOPPED, LIMIT_S)
    sys.stdout.write(f"{verdict(full)}\n")
    steps = [step["step"] for step in fleet.metrics(run)]
    assert steps == list(range(len(steps))), "a step was made twice"
    directory = RunDirectory(Path(run["directory"]))
    assert {int(sample["step"]) for sample in directory.read_samples()} == set(steps)
    sequences = [event["sequence"] for event in directory.read_events()]
    assert sequences == [str(number) for number in range(1, len(sequences) + 1)], "an event was lost"
