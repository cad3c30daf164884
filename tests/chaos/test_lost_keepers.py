"""Launcher and guardian are killed at the same moment: the fleet ends by itself, and after `up` the run goes on.

One of its services hangs meanwhile, which no SIGTERM can end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from accounts import assert_accounted_for

from flotilla.coordinator.v1.run_pb2 import RUN_STATE_SUCCEEDED
from flotilla_launch import shared_memory
from flotilla_testing.chaos_run import LIMIT_S, ChaosRun, chaos_fleet
from flotilla_testing.fault_moments import Moment, reached
from flotilla_testing.fault_victims import guardian_of, launcher_of
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(600)

GONE_WITHIN_S = 60.0


async def test_without_launcher_and_guardian_the_fleet_ends_and_up_goes_on(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chaos_fleet(arithmetic / "model", tmp_path) as stack, ChaosRun(stack, arithmetic, tmp_path) as run:
        run.wait_for_steps(2, 0, "at the start")
        wait_until("a guardian", lambda: guardian_of(stack) is not None, LIMIT_S)
        keepers = [launcher_of(stack), guardian_of(stack)]
        assert len(processes_below(stack)) > len(keepers)
        await reached(run, Moment.BEFORE_ACK, run.serving()[0])
        shared = shared_memory.held_by(process.pid for process in processes_below(stack))
        stack.process(run.serving()[-1]).suspend()
        for keeper in keepers:
            assert keeper is not None
            keeper.kill()
        struck = time.monotonic()
        wait_until("the end of every process", lambda: not processes_below(stack), GONE_WITHIN_S)
        gone_s = time.monotonic() - struck
        assert not [name for name in shared if (Path("/dev/shm") / name).exists()]
        assert not list((stack.directory / "instances").glob("*.json"))
        assert not (stack.directory / "processes.json").exists()

        steps = run.lines
        outcome = stack.flotilla("up")
        assert outcome.code == 0, outcome.err
        run.wait_for_steps(2, steps, "after the next up")
        ended = run.ends_by_itself()
        assert ended.state == RUN_STATE_SUCCEEDED, ended.reason
        verdict = assert_accounted_for(stack, run.run_id)
    with capsys.disabled():
        sys.stdout.write(f"\n  launcher and guardian: all gone after {gone_s:.1f} s: {verdict}")


def processes_below(stack: Stack) -> list[psutil.Process]:
    """Every process whose command line, environment or working folder names the directory of the stack."""
    found = []
    for process in psutil.process_iter():
        try:
            says = [*process.cmdline(), *process.environ().values(), process.cwd()]
            lives = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue  # it ended between two looks, or is somebody else's
        if lives and any(str(stack.directory) in text for text in says):
            found.append(process)
    return found
