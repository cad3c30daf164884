"""Whatever takes part in an episode is killed in the middle of it, in every phase: no episode is lost or trained twice.

A generator's death repeats the turn. After the death of an environment, of its worker, or of the coordinator, the turns
that there are are played again, and the episode goes on. The turns that a dead coordinator recorded are those that are
trained.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accounts import assert_accounted_for

from flotilla.coordinator.v1.run_pb2 import RUN_STATE_SUCCEEDED
from flotilla_coordinator.ledger.records import SampleState
from flotilla_testing.chaos_run import VLLM, ChaosRun, chaos_fleet
from flotilla_testing.coordinator_faults import is_new
from flotilla_testing.fault_moments import LIMIT_S, LOOK_EVERY_S, Moment, reached
from flotilla_testing.fault_victims import Victim, process_of
from flotilla_testing.stack import Stack

SEED = int(os.environ.get("FLOTILLA_CHAOS_SEED", "1"))
VICTIMS = (Victim.GENERATOR, Victim.COORDINATOR, Victim.ENVIRONMENT, Victim.ENVIRONMENT_WORKER)
RANDOM_KILLS = 20


class Phase(StrEnum):
    """The progress of an episode."""

    ASKED = "asked"
    """Its environment replies to a turn, and asks for the next one."""
    WRITING = "writing"
    """A generator writes a turn."""
    SCORED = "scored"
    """It is recorded with its reward, and no update has it."""
    BATCH = "batch"
    """The trainer has the batch with it."""
    UPDATED = "updated"
    """The weights that it changed are on their way to the generators."""


MOMENTS = {
    Phase.WRITING: Moment.ROLLOUT,
    Phase.BATCH: Moment.BEFORE_PUBLISH,
    Phase.UPDATED: Moment.MID_SYNC,
}


@pytest.mark.timeout(900)
async def test_no_episode_is_lost_or_trained_twice_whatever_dies_in_whichever_phase(
    fleet_of_faults: Stack, arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(SEED)
    kills = [(victim, phase) for victim in VICTIMS for phase in Phase]
    with ChaosRun(fleet_of_faults, arithmetic, tmp_path, episodes=True) as run:
        await _killed(run, draw.sample(kills, len(kills)), draw, capsys)


@pytest.mark.timeout(3600)
async def test_no_episode_of_the_real_engine_is_lost_or_trained_twice_in_twenty_random_kills(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(f"{SEED} real")
    kills = [(draw.choice(VICTIMS), draw.choice([*Phase])) for _ in range(RANDOM_KILLS)]
    with (
        chaos_fleet(arithmetic / "model", tmp_path, VLLM) as fleet,
        ChaosRun(fleet, arithmetic, tmp_path, episodes=True) as run,
    ):
        await _killed(run, kills, draw, capsys)


async def _killed(
    run: ChaosRun,
    kills: list[tuple[Victim, Phase]],
    draw: random.Random,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kill one after the other, each in a fleet that is whole again; then the run ends by itself."""
    run.wait_for_steps(2, 0, "at the start")
    kept = 0
    for victim, phase in kills:
        run.wait_until("a fleet that can lose one", lambda: _is_whole(run))
        generator = draw.choice(run.serving())
        slot = f"environment-{draw.randrange(2)}" if victim.plays else generator
        process = process_of(run.stack, victim, slot)
        await _in_phase(run, phase, generator)
        steps, at = run.lines, time.time()
        process.send_signal(signal.SIGKILL)
        left: dict[str, bytes] = {}
        if victim is Victim.COORDINATOR:
            pid = process.pid
            process.wait(LIMIT_S)
            left = _turns_under_way(run)
            run.wait_until("a new coordinator", lambda pid=pid: is_new(run.stack, pid))  # type: ignore[misc]
        run.wait_for_steps(2, steps, f"after the death of {victim}")
        took_s = time.time() - at
        verdict = assert_accounted_for(run.stack, run.run_id)
        kept += _kept(run, left)
        line = f"{victim:20}{phase:10}{took_s:6.1f} s  lost {verdict.lost}, trained twice {verdict.trained_twice}"
        _print(capsys, f"{line}, {len(left)} episodes with recorded turns" if left else line)
    assert kept, "no coordinator died with recorded turns"
    ended = run.ends_by_itself()
    assert ended.state == RUN_STATE_SUCCEEDED, ended.reason
    steps_of = run.stack.metrics(run.started)
    repeated, resumed = (
        sum(step.get(f"episodes/{name}", 0.0) for step in steps_of) for name in ("repeated", "resumed")
    )
    assert resumed, "what goes on is counted"
    _print(
        capsys,
        f"{len(kills)} kills, {repeated:.0f} episodes anew, {resumed:.0f} went on, {kept} with recorded turns trained: "
        f"{assert_accounted_for(run.stack, run.run_id)}",
    )


def _turns_under_way(run: ChaosRun) -> dict[str, bytes]:
    """Return the tokens that the ledger has of each episode that has not ended."""
    rows = _ask(
        run,
        "SELECT s.sample_id, t.token_ids FROM turns t JOIN samples s ON s.key = t.sample "
        "JOIN runs r ON r.key = s.run WHERE r.run_id = ? ORDER BY t.sample, t.number",
    )
    found: dict[str, bytes] = {}
    for sample_id, token_ids in rows:
        found[sample_id] = found.get(sample_id, b"") + token_ids
    return found


def _kept(run: ChaosRun, left: dict[str, bytes]) -> int:
    """Return how many of these episodes were trained by now, each with the tokens that were left."""
    rows = _ask(
        run,
        "SELECT s.sample_id, p.token_ids, p.trained FROM payloads p JOIN samples s ON s.key = p.sample "
        "JOIN runs r ON r.key = s.run WHERE r.run_id = ? AND s.update_key IS NOT NULL",
    )
    trained = {sample_id: (tokens, marks) for sample_id, tokens, marks in rows if sample_id in left}
    for sample_id, (tokens, marks) in trained.items():
        written = np.frombuffer(tokens, "<i4")[np.frombuffer(marks, "?")].tobytes()
        assert written.startswith(left[sample_id]), f"{sample_id} was trained with other turns"
    return len(trained)


def _is_whole(run: ChaosRun) -> bool:
    pairs = all(len(run.working(kind)) == 2 for kind in ("reward", "environment"))
    return pairs and len(run.serving()) >= run.engine.serving


async def _in_phase(run: ChaosRun, phase: Phase, generator: str) -> None:
    """Return when an episode is in this phase."""
    if phase in MOMENTS:
        await reached(run.stack, run.started, MOMENTS[phase], generator)
        return
    met: Callable[[], bool] = run.marker.exists if phase is Phase.ASKED else lambda: _scored(run)
    try:
        async with asyncio.timeout(LIMIT_S):
            while not met():
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        raise AssertionError(f"waited {LIMIT_S:g} s for an episode that is {phase}") from None


def _scored(run: ChaosRun) -> bool:
    question = (
        "SELECT count(*) FROM samples s JOIN runs r ON r.key = s.run WHERE r.run_id = ? AND s.state = ?"
    )
    ((count,),) = _ask(run, question, SampleState.SCORED)
    return bool(count)


def _ask(run: ChaosRun, question: str, *values: int) -> list[Any]:
    with closing(
        sqlite3.connect(f"file:{run.stack.directory / 'ledger.sqlite'}?mode=ro", uri=True)
    ) as ledger:
        return ledger.execute(question, (run.run_id, *values)).fetchall()


def _print(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  {line}")
