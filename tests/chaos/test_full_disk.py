"""The disk of a stack fills up at a random write of a run, again and again: the run pauses, says why, and goes on.

Everything that the stack writes is on one small disk: ledger, run directory, checkpoints, spans, logs, NATS, the
launcher's files. Simulated engine, accepting trainer, everything else real.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.rundir import RunDirectory
from flotilla_core.errors import FlotillaError
from flotilla_testing.coordinator_faults import endless_run
from flotilla_testing.small_disk import SmallDisk, small_disk
from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(900)

STRIKES = 20
LIMIT_S = 60.0
LATEST_S = 0.5
MOST_LEFT_BYTES = 128 << 10
WAITS = "wait for disk space"


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
    """Its state directory is the small disk."""
    sim = {"seconds_per_token": 0.005}
    with light_stack(arithmetic / "model", disk.path.parent, sim=sim, trainer_s=0.02) as running:
        yield running
        disk.free()


class FullDisks:
    """One run, and what is seen of it strike by strike."""

    def __init__(self, fleet: Stack, disk: SmallDisk, run: dict[str, Any], seed: int) -> None:
        self.fleet, self.disk, self.run = fleet, disk, run
        self.chance = random.Random(seed)

    @property
    def steps(self) -> int:
        return len(self.fleet.metrics(self.run))

    def now(self) -> run_pb2.Run:
        with self.fleet.client() as client:
            return client.get_run(self.run["run_id"])

    def waits(self) -> bool:
        try:
            now = self.now()
        except FlotillaError:  # the coordinator is on its way back
            return False
        return now.state == run_pb2.RUN_STATE_PAUSED and now.phase == WAITS

    def fill(self) -> float:
        """Fill the disk at a random moment, until the run waits; the seconds that this took."""
        after_s, left = self.chance.uniform(0, LATEST_S), self.chance.randrange(MOST_LEFT_BYTES)
        moment = time.monotonic() + after_s
        wait_until("the moment", lambda: time.monotonic() >= moment, every_s=0.001)
        self.disk.fill(left)
        filled = time.monotonic()

        def waits() -> bool:
            self.disk.fill()  # also what others gave back meanwhile
            return self.waits()

        wait_until("the run to wait for disk space", waits, LIMIT_S)
        reason = self.now().reason
        assert str(self.disk.path) in reason and "MiB free" in reason, reason
        return time.monotonic() - filled

    def free(self) -> float:
        """Free the disk; the seconds until the run had made two more steps by itself."""
        before, freed = self.steps, time.monotonic()
        self.disk.free()
        wait_until("two more steps", lambda: self.steps >= before + 2, LIMIT_S)
        assert self.now().state == run_pb2.RUN_STATE_RUNNING
        return time.monotonic() - freed

    def verdict(self) -> str:
        """Nothing was lost or trained twice, and every step has its one line."""
        verdict = check(self.fleet.directory / "ledger.sqlite", self.run["run_id"])
        assert verdict.passed and verdict.lost == verdict.trained_twice == verdict.stale == 0, str(verdict)
        return str(verdict)


def test_a_run_on_a_full_disk_pauses_and_goes_on_by_itself_twenty_times(
    fleet: Stack, disk: SmallDisk, arithmetic: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    run = fleet.ok("run", "start", str(endless_run(arithmetic, tmp_path, 1)))
    full = FullDisks(fleet, disk, run, seed)
    wait_until("two steps", lambda: full.steps >= 2, LIMIT_S)
    for strike in range(1, STRIKES + 1):
        noticed_s = full.fill()
        text = full.now().reason
        went_on_s = full.free()
        print(
            f"strike {strike}: after step {full.steps}, paused in {noticed_s:.1f} s, "
            f"two more steps {went_on_s:.1f} s after space was freed, {full.verdict()}: {text}"
        )
    fleet.ok("run", "stop", run["run_id"])
    wait_until("the end", lambda: full.now().state == run_pb2.RUN_STATE_STOPPED, LIMIT_S)
    print(full.verdict())
    steps = [step["step"] for step in fleet.metrics(run)]
    assert steps == list(range(len(steps))), "a step was made twice"
    directory = RunDirectory(Path(run["directory"]))
    assert {int(sample["step"]) for sample in directory.read_samples()} == set(steps)
    sequences = [event["sequence"] for event in directory.read_events()]
    assert sequences == [str(number) for number in range(1, len(sequences) + 1)], "an event was lost"
