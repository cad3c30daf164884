"""A small disk that a test fills and frees, with a whole stack on it, and a run that is watched meanwhile.

Invariants: the disk is a tmpfs of its own, so that no other file suffers; everything that the stack writes is on it:
ledger, run directory, checkpoints, spans, logs, NATS, the launcher's files; every wait is bounded and named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flotilla.coordinator.v1 import run_pb2
from flotilla_core.disk import free_bytes
from flotilla_core.errors import FlotillaError
from flotilla_testing.stack import Stack, light_stack, wait_until

LIMIT_S = 60.0
LATEST_S = 0.5
MOST_LEFT_BYTES = 128 << 10
WAITS = "wait for disk space"
STEPS = "steps=2000"
"""The steps of a run whose plan fits on the disk."""


class SmallDisk:
    """A mounted disk, and the file that fills it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / ".filler"

    def fill(self, leave: int = 0) -> None:
        """Take everything but `leave` bytes, whatever else is written meanwhile."""
        with self._filler.open("ab", buffering=0) as file:
            while (free := free_bytes(self.path) - leave) > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(path: Path, mib: int = 96) -> Iterator[SmallDisk]:
    """A tmpfs of `mib` at `path`, until the block ends; raises PermissionError where nothing may be mounted here."""
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        raise PermissionError(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def stack_on(disk: SmallDisk, model: Path) -> Iterator[Stack]:
    """A light fleet whose state directory is the disk."""
    sim = {"seconds_per_token": 0.005}
    with light_stack(model, disk.path.parent, sim=sim, trainer_s=0.02) as running:
        try:
            yield running
        finally:
            disk.free()


class RunOnDisk:
    """One run, and what is seen of it strike by strike."""

    def __init__(self, fleet: Stack, disk: SmallDisk, run: dict[str, Any], seed: int = 0) -> None:
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
