"""Every process of a fleet is killed, and stopped, at every moment of a step: nothing is lost or trained twice.

A row of the matrix is a victim, and one run. Its cells are a fault at a moment (`Moment`), in an order that the seed
draws (`FLOTILLA_CHAOS_SEED`). After each cell the run makes steps again, the ledger balances and generators with one
version hold equal weights; after the last one the run is told its last step and ends by itself.

| victim         | kill -9                                         | SIGSTOP                                     |
|----------------|-------------------------------------------------|---------------------------------------------|
| generator      | its samples go to the others                    | so, too; resumed, it serves again           |
| reward replica | its samples go to the other one                 | a pause is waited for; for long: so, too    |
| trainer rank   | a new gang goes on from the newest checkpoint   | so, too, after `rank_timeout_s`             |
| trainer front  | so, too                                         | a pause is waited for; for long: so, too    |
| coordinator    | the next one goes on with the sessions there are| it goes on, after a long pause as well      |
| NATS           | nobody waits for it                             | nobody waits for it                         |
| launcher       | so, too; the next one adopts all that lives     | nobody waits for it                         |
| guardian       | so, too; the launcher starts another one        | nobody waits for it                         |

Runs of episodes have rows of their own, with the moments of an episode as well. Turns that the ledger has when a fault
happens are trained as they were recorded, byte for byte.

| victim         | kill -9                                         | SIGSTOP                                     |
|----------------|-------------------------------------------------|---------------------------------------------|
| generator      | the turn that it wrote goes to another one      | so, too                                     |
| coordinator    | the next one plays the recorded turns again     | it goes on                                  |
| environment    | the other one gets the turns so far again       | a pause is waited for                       |
| its worker     | its service plays them again in the next one    | a pause is waited for                       |

Engines are simulated. Generators have one more row, with the real engine and its canary. After its last cell each
version is still compared. Episodes of the real engine are in test_episode_kills.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from accounts import assert_accounted_for

from flotilla.coordinator.v1.run_pb2 import RUN_STATE_SUCCEEDED
from flotilla_core.process_identity import ProcessIdentity
from flotilla_testing.chaos_run import VLLM, ChaosRun, chaos_fleet
from flotilla_testing.coordinator_faults import is_new
from flotilla_testing.fault_moments import OF_EPISODES, OF_STEPS, Moment, reached
from flotilla_testing.fault_victims import (
    PLAYERS,
    Victim,
    guardian_of,
    launcher_of,
    process_of,
    processes_of,
)
from flotilla_testing.recorded_turns import RecordedTurns
from flotilla_testing.runs import live_checks
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(900)

SEED = int(os.environ.get("FLOTILLA_CHAOS_SEED", "1"))
PAUSE_S = 2.0
LONG_S = 25.0
"""Longer than a heartbeat is waited for by anybody."""
COORDINATOR_BACK_WITHIN_S = 30.0
STARTED_AGAIN_WITHIN_S = 10.0
REAL_ROW_WITHIN_S = 3600.0
"""Five boots of the real engine, each beside other suites, and what an idle machine needs beside them."""


class Fault(StrEnum):
    """What happens to a process."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    LONG_STOP = "SIGSTOP, for long"


RANKS = (Victim.RANK_0, Victim.RANK_1)
NOBODY_WAITS = (Victim.GENERATOR, Victim.NATS, Victim.LAUNCHER, Victim.GUARDIAN)
PLAYED_AGAIN = (Victim.COORDINATOR, Victim.ENVIRONMENT)
"""Those whose death the coordinator knows in episodes: a turn is repeated, and a worker's episodes are, without it."""
KEEPERS = {Victim.LAUNCHER: launcher_of, Victim.GUARDIAN: guardian_of}
# Where a pause is waited for, one that is not.
LONG_STOPS = {
    Victim.REWARD: Moment.ROLLOUT,
    Victim.FRONT: Moment.BEFORE_PUBLISH,
    Victim.COORDINATOR: Moment.ROLLOUT,
    Victim.NATS: Moment.ROLLOUT,
}


class Row(NamedTuple):
    """A victim, in a run of single responses or of episodes."""

    victim: Victim
    episodes: bool = False

    def __str__(self) -> str:
        return f"{self.victim} in episodes" if self.episodes else str(self.victim)


BRIEF = (Fault.KILL, Fault.STOP)
MATRIX: dict[Row, list[tuple[Fault, Moment]]] = {
    Row(victim): [
        *((fault, moment) for fault in BRIEF for moment in OF_STEPS),
        *((Fault.LONG_STOP, moment) for one, moment in LONG_STOPS.items() if one is victim),
    ]
    for victim in Victim
    if not victim.plays
} | {
    # Those that also take part in other runs are stopped there at the moments of a step.
    Row(victim, episodes=True): [
        *((fault, moment) for fault in BRIEF for moment in OF_EPISODES),
        *((fault, moment) for fault in (BRIEF if victim.plays else (Fault.KILL,)) for moment in OF_STEPS),
    ]
    for victim in PLAYERS
}


@dataclass
class Strike:
    """A fault that has happened."""

    fault: Fault
    victim: Victim
    slot: str
    process: psutil.Process
    steps: int
    lineage: int
    at: float
    lived: dict[str, ProcessIdentity | None]
    """Every process that the launcher had written down."""
    episodes: int
    """The number of those that had turns in the ledger, and had not ended."""


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: str(row).replace(" ", "-"))
async def test_nothing_is_lost_or_trained_twice(
    fleet_of_faults: Stack,
    arithmetic: Path,
    tmp_path: Path,
    row: Row,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ChaosRun(fleet_of_faults, arithmetic, tmp_path, episodes=row.episodes) as run:
        await _struck_in(run, row, capsys)


@pytest.mark.timeout(REAL_ROW_WITHIN_S)
async def test_nothing_is_lost_or_trained_twice_with_the_real_engine(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        chaos_fleet(arithmetic / "model", tmp_path, VLLM) as fleet,
        ChaosRun(fleet, arithmetic, tmp_path) as run,
    ):
        last = await _struck_in(run, Row(Victim.GENERATOR), capsys)
        found = live_checks(fleet.metrics(run.started)[last.steps + 1 :])
    assert len(found) > 1, "each version is compared, also after the last fault"
    _print(capsys, f"canary after the last fault: {len(found)} checks, differences up to {max(found):.1e}")


async def _struck_in(run: ChaosRun, row: Row, capsys: pytest.CaptureFixture[str]) -> Strike:
    """All cells of a row, and the end of the run; the last of the faults."""
    draw = random.Random(f"{SEED} {row}")
    began = time.monotonic()
    turns = RecordedTurns(run)
    run.wait_for_steps(2, 0, "at the start")
    for fault, moment in draw.sample(MATRIX[row], len(MATRIX[row])):
        strike = await _struck(run, fault, row.victim, moment, turns, draw)
        recovered_s = _recovered(run, strike)
        verdict = assert_accounted_for(run.stack, run.run_id)
        turns.compare()
        line = f"{row!s:32}{fault:19}{moment:26}{recovered_s:6.1f} s"
        if row.episodes:
            line += f"  {strike.episodes:2} episodes with recorded turns"
        elif row.victim is Victim.GENERATOR:
            line += _issued_again(run, strike)
        _print(capsys, f"{line}  lost {verdict.lost}, trained twice {verdict.trained_twice}")
    ended = run.ends_by_itself()
    assert ended.state == RUN_STATE_SUCCEEDED, ended.reason
    turns.compare()
    seconds = time.monotonic() - began
    verdict = assert_accounted_for(run.stack, run.run_id)
    _print(capsys, f"{row!s:32}ended by itself after {seconds:.0f} s, seed {SEED}: {verdict}")
    if row.episodes:
        _went_on(run, row, turns, capsys)
    return strike


def _went_on(run: ChaosRun, row: Row, turns: RecordedTurns, capsys: pytest.CaptureFixture[str]) -> None:
    """Every episode with recorded turns was trained with them; the coordinator played those again that it had to."""
    assert turns.trained and not turns.waiting, f"{turns.trained} were trained, and not {turns.waiting}"
    steps = run.stack.metrics(run.started)
    resumed, anew = (
        sum(step.get(f"episodes/{name}", 0.0) for step in steps) for name in ("resumed", "repeated")
    )
    assert bool(resumed) is (row.victim in PLAYED_AGAIN)
    line = f"{turns.trained} episodes trained with their recorded turns, {resumed:.0f} went on, {anew:.0f} began anew"
    _print(capsys, f"{row!s:32}{line}")


async def _struck(
    run: ChaosRun, fault: Fault, victim: Victim, moment: Moment, turns: RecordedTurns, draw: random.Random
) -> Strike:
    """Let it happen at that moment; a stopped process is let go on when that is due."""
    generator = draw.choice(run.when_whole())
    slot = f"reward-{draw.randrange(2)}" if victim is Victim.REWARD else generator
    slot = f"environment-{draw.randrange(2)}" if victim.plays else slot
    process = process_of(run.stack, victim, slot)
    await reached(run, moment, generator)
    # At once: some moments are over in ten milliseconds.
    at = time.time()
    process.send_signal(signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)
    noted, lived = turns.note(), processes_of(run.stack)
    strike = Strike(fault, victim, slot, process, run.lines, run.lineage, at, lived, noted)
    if fault is not Fault.KILL:
        try:
            _held(run, strike)
        finally:
            if process.is_running():
                process.resume()
    return strike


def _held(run: ChaosRun, strike: Strike) -> None:
    """Until the fleet has gone on without the process, or for a while where it waits."""
    long = strike.fault is Fault.LONG_STOP
    if strike.victim in RANKS:
        run.wait_until("the end of the rank that is stopped", lambda: not strike.process.is_running())
    elif strike.victim is Victim.FRONT and long:
        run.wait_until("the run to miss its trainer", lambda: _misses_trainer(run))
    elif strike.victim in NOBODY_WAITS or (strike.victim is Victim.REWARD and long):
        run.wait_for_steps(2, strike.steps, f"without {strike.slot}")
        if long and strike.victim is Victim.NATS:
            time.sleep(LONG_S)
    else:
        time.sleep(LONG_S if long else PAUSE_S)


def _recovered(run: ChaosRun, strike: Strike) -> float:
    """Seconds from the fault to a whole step that began after it."""
    if strike.victim is Victim.COORDINATOR and strike.fault is Fault.KILL:
        run.wait_until("a new coordinator", lambda: is_new(run.stack, strike.process.pid))
    if strike.victim in KEEPERS:
        _kept(run.stack, strike)
    run.wait_for_steps(2, strike.steps, f"after {strike.fault} of {strike.victim}")
    if strike.victim in RANKS or (strike.victim is Victim.FRONT and strike.fault is not Fault.STOP):
        run.wait_until("a step after the checkpoint", lambda: run.lineage > strike.lineage)
    else:
        assert run.lineage == strike.lineage, "the trainer lives: nothing goes back to a checkpoint"
    seconds = time.time() - strike.at
    if strike.victim is Victim.COORDINATOR and strike.fault is Fault.KILL:
        assert seconds < COORDINATOR_BACK_WITHIN_S
    if strike.fault is not Fault.KILL and strike.victim is Victim.GENERATOR:
        run.wait_until(f"{strike.slot} to serve again", lambda: _serves(run, strike.slot))
    return seconds


def _kept(stack: Stack, strike: Strike) -> None:
    """The other one of launcher and guardian starts it again, and that costs no other process anything."""
    found = KEEPERS[strike.victim]
    if strike.fault is Fault.KILL:
        left = STARTED_AGAIN_WITHIN_S - (time.time() - strike.at)
        wait_until(f"another {strike.victim}", lambda: _is_another(found(stack), strike.process), left)
    else:
        assert found(stack) == strike.process, f"a {strike.victim} that is only silent is replaced by none"
    assert processes_of(stack) == strike.lived


def _is_another(found: psutil.Process | None, former: psutil.Process) -> bool:
    return found is not None and found != former


def _misses_trainer(run: ChaosRun) -> bool:
    return run.now().phase == "waiting for services"


def _serves(run: ChaosRun, slot: str) -> bool:
    return slot in run.serving()


def _issued_again(run: ChaosRun, strike: Strike) -> str:
    """How long after the loss was known the first sample came that was issued again, where any was."""
    known = _ejected_at(run.stack, strike)
    if known is None:
        return ""
    ledger = sqlite3.connect(f"file:{run.stack.directory / 'ledger.sqlite'}?mode=ro", uri=True)
    (came,) = ledger.execute(
        "SELECT min(t.time) FROM transitions t JOIN runs r ON r.key = t.run "
        "WHERE r.run_id = ? AND t.attempt > 0 AND t.to_state = 2 AND t.time >= ?",
        (run.run_id, known),
    ).fetchone()
    ledger.close()
    if came is None:
        return "  nothing to issue again"
    assert came - known < run.engine.issued_again_within_s
    return f"  issued again, decoded and scored {came - known:.2f} s after the loss was known"


def _ejected_at(stack: Stack, strike: Strike) -> float | None:
    for text in (stack.directory / "logs" / "coordinator.log").read_text().splitlines():
        if '"replica ejected"' not in text or strike.slot not in text:
            continue
        at = datetime.fromisoformat(json.loads(text)["time"]).timestamp()
        if at >= strike.at:
            return at
    return None


def _print(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  {line}")
