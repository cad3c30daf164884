"""The moments of a run at which something may happen to a process, seen from outside.

Invariants: a moment is met by the calls and files that operators have, and by what the environment of the run marks, so
the product holds no hook for tests; every wait is bounded and named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from pathlib import Path

import grpc

from flotilla.coordinator.v1 import coordinator_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from flotilla.generator.v1 import generator_pb2
from flotilla_core.rpc import unary
from flotilla_testing.chaos_run import HEARS, JUDGES, ChaosRun
from flotilla_testing.replica_faults import in_weight_phase, owes_work

LOOK_EVERY_S = 0.001
LIMIT_S = 120.0


class Moment(StrEnum):
    """The progress of a run within a step, and of an episode within both."""

    ASKED = "turn asked for"
    """The environment of an episode has replied, and the next turn is on its way to a generator."""
    ROLLOUT = "rollout"
    """A generator decodes, in episodes a turn: any moment, for a victim that takes no part in the others."""
    HEARD = "turn delivered"
    """The environment has a turn, and thinks about it."""
    JUDGED = "reward"
    """The environment has the last turn, and thinks about the reward."""
    SCORED = "scored"
    """An episode is recorded with its reward, and no update has it."""
    BEFORE_PUBLISH = "before publish"
    """The batch is at the trainer; its version is on no generator."""
    MID_SYNC = "mid weight sync"
    """A generator receives the version."""
    BEFORE_ACK = "after publish, before ack"
    """The version was sent, and a generator that has it has not confirmed that it serves it."""
    MID_CHECKPOINT = "mid checkpoint"
    """A checkpoint is begun and not sealed."""


# At the first three of these, the ledger has turns of episodes that have not ended.
OF_EPISODES = (Moment.ASKED, Moment.HEARD, Moment.JUDGED, Moment.SCORED)
OF_STEPS = tuple(moment for moment in Moment if moment not in OF_EPISODES)
WEIGHT_PHASES = {
    Moment.MID_SYNC: {generator_pb2.WEIGHT_PHASE_RECEIVING},
    Moment.BEFORE_ACK: {generator_pb2.WEIGHT_PHASE_STAGED, generator_pb2.WEIGHT_PHASE_COMMITTING},
}


async def reached(run: ChaosRun, moment: Moment, generator: str) -> None:
    """Return when the run is at `moment`; where that is about one generator, about this one."""
    where = generator if moment in WEIGHT_PHASES else "coordinator"
    async with run.stack.channel(where) as channel:
        looks: dict[Moment, Callable[[], Awaitable[bool]]] = {
            Moment.ASKED: _Mark(run, HEARS, ends=True),
            Moment.ROLLOUT: partial(owes_work, channel, generator),
            Moment.HEARD: _Mark(run, HEARS),
            Moment.JUDGED: _Mark(run, JUDGES),
            Moment.SCORED: partial(_scored, run),
            Moment.BEFORE_PUBLISH: partial(_trains, channel, run.run_id),
            Moment.MID_CHECKPOINT: _Saves(Path(run.started["directory"]) / "checkpoints"),
        }
        met = looks.get(moment) or partial(in_weight_phase, channel, WEIGHT_PHASES[moment])
        try:
            async with asyncio.timeout(LIMIT_S):
                while not await met():  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S:g} s for {moment} of {run.run_id}") from None


class _Mark:
    """Whether the environment made this mark since then, and with `ends` whether it took it away again."""

    def __init__(self, run: ChaosRun, name: str, *, ends: bool = False) -> None:
        self._run, self._mark, self._ends, self._seen = run, run.folder / name, ends, False
        self._mark.unlink(missing_ok=True)  # of a worker that died

    async def __call__(self) -> bool:
        there, before = self._mark.exists(), self._seen
        self._seen = there
        return (before and not there if self._ends else there) and self._are_recorded()

    def _are_recorded(self) -> bool:
        question = (
            "SELECT EXISTS (SELECT 1 FROM turns t JOIN samples s ON s.key = t.sample "
            "JOIN runs r ON r.key = s.run WHERE r.run_id = ?)"
        )
        ((found,),) = self._run.ask_ledger(question)
        return bool(found)


async def _scored(run: ChaosRun) -> bool:
    question = (
        "SELECT count(*) FROM samples s JOIN runs r ON r.key = s.run WHERE r.run_id = ? AND s.state = ?"
    )
    ((count,),) = run.ask_ledger(question, coordinator_pb2.SAMPLE_STATE_SCORED)
    return bool(count)


async def _trains(channel: grpc.aio.Channel, run_id: str) -> bool:
    request = coordinator_pb2.GetRunRequest(run_id=run_id)
    return (await unary(CoordinatorServiceStub(channel).GetRun, request, timeout_s=10)).run.phase == "train"


class _Saves:
    """Whether a checkpoint was begun since then and is not sealed; others may have been left as they were."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = self._unsealed()

    async def __call__(self) -> bool:
        return bool(self._unsealed() - self._left)

    def _unsealed(self) -> set[tuple[str, int]]:
        found = set()
        for path in self._folder.glob(".*.writing"):
            try:
                found.add((path.name, path.stat().st_ctime_ns))
            except FileNotFoundError:
                continue  # sealed between two looks
        return found
