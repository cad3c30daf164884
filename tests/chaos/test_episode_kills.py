"""Whatever takes part in an episode of the real engine is killed in the middle of it: nothing is lost or trained twice.

A generator's death repeats the turn. After the death of an environment, of its worker, or of the coordinator, the turns
that there are are played again, and the episode goes on. Turns that are recorded at a death are those that are trained.
The fault matrix has each of these deaths at each moment, with simulated engines.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla.coordinator.v1.run_pb2 import RUN_STATE_SUCCEEDED
from flotilla_testing.chaos_run import VLLM, ChaosRun, chaos_fleet
from flotilla_testing.coordinator_faults import is_new
from flotilla_testing.fault_moments import Moment, reached
from flotilla_testing.fault_victims import PLAYERS, Victim, process_of
from flotilla_testing.recorded_turns import RecordedTurns

SEED = int(os.environ.get("FLOTILLA_CHAOS_SEED", "1"))
RANDOM_KILLS = 20


@pytest.mark.timeout(3600)
async def test_no_episode_of_the_real_engine_is_lost_or_trained_twice_in_twenty_random_kills(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(f"{SEED} real")
    with (
        chaos_fleet(arithmetic / "model", tmp_path, VLLM) as fleet,
        ChaosRun(fleet, arithmetic, tmp_path, episodes=True) as run,
    ):
        turns = RecordedTurns(run)
        run.wait_for_steps(2, 0, "at the start")
        for _ in range(RANDOM_KILLS):
            await _killed(run, draw, turns, capsys)
        ended = run.ends_by_itself()
        assert ended.state == RUN_STATE_SUCCEEDED, ended.reason
        turns.compare()
        assert turns.trained and not turns.waiting
        verdict = assert_accounted_for(run.stack, run.run_id)
        _print(capsys, f"{turns.trained} episodes trained with their recorded turns: {verdict}")


async def _killed(
    run: ChaosRun, draw: random.Random, turns: RecordedTurns, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill one of them at some moment, in a fleet that is whole; return when the run makes steps again."""
    generator = draw.choice(run.when_whole())
    victim, moment = draw.choice(PLAYERS), draw.choice([*Moment])
    process = process_of(run.stack, victim, f"environment-{draw.randrange(2)}" if victim.plays else generator)
    await reached(run, moment, generator)
    at = time.time()
    process.send_signal(signal.SIGKILL)
    noted, steps = turns.note(), run.lines
    if victim is Victim.COORDINATOR:
        run.wait_until("a new coordinator", lambda: is_new(run.stack, process.pid))
    run.wait_for_steps(2, steps, f"after the death of {victim}")
    took_s = time.time() - at
    verdict = assert_accounted_for(run.stack, run.run_id)
    turns.compare()
    line = f"{victim:20}{moment:26}{took_s:6.1f} s  {noted:2} episodes with recorded turns"
    _print(capsys, f"{line}  lost {verdict.lost}, trained twice {verdict.trained_twice}")


def _print(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  {line}")
