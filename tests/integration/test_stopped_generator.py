"""A generator that is stopped (SIGSTOP) costs no sample, and serves again when it goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from flotilla.coordinator.v1.run_pb2 import RUN_STATE_SUCCEEDED
from flotilla_coordinator.ledger.checker import check
from flotilla_testing.chaos_run import ChaosRun, until
from flotilla_testing.fault_moments import Moment, reached
from flotilla_testing.stack import light_stack

pytestmark = pytest.mark.timeout(300)

VICTIM = "generator-1"


async def test_a_stopped_generator_costs_no_sample_and_serves_again(arithmetic: Path, tmp_path: Path) -> None:
    """At one moment; all of them, for every process of a fleet, are met in tests/chaos."""
    sim = {"seconds_per_token": 0.02, "commit_s": 0.1}
    with light_stack(arithmetic / "model", tmp_path, replicas=2, sim=sim, trainer_s=0.1) as stack:
        async with ChaosRun(stack, arithmetic, tmp_path) as run:

            async def serves() -> bool:
                return VICTIM in await run.serving()

            await until(f"{VICTIM} to serve", serves)
            run.wait_for_steps(1, 0, "at the start")
            process = stack.process(VICTIM)
            await reached(stack, run.started, Moment.ROLLOUT, VICTIM)
            done = run.lines
            process.send_signal(signal.SIGSTOP)
            try:
                run.wait_for_steps(2, done, f"without {VICTIM}")
            finally:
                process.resume()
            await until(f"{VICTIM} to serve again", serves)
            ended = await run.ends_by_itself()
            assert ended.state == RUN_STATE_SUCCEEDED, ended.reason
            verdict = check(stack.directory / "ledger.sqlite", run.run_id)
    assert verdict.passed and verdict.lost == verdict.trained_twice == 0, str(verdict)
