"""The moments of a run at which something may happen to a process, seen from outside.

Invariants: a moment is met by the calls and files that operators have, so the product holds no hook for tests; every
wait is bounded and named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from flotilla.coordinator.v1 import coordinator_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from flotilla.generator.v1 import generator_pb2
from flotilla_core.rpc import unary
from flotilla_testing.replica_faults import in_weight_phase, owes_work
from flotilla_testing.stack import Stack

LOOK_EVERY_S = 0.001
LIMIT_S = 120.0


class Moment(StrEnum):
    """The progress of a run within a step."""

    ROLLOUT = "rollout"
    """A generator decodes: any moment, for a victim that takes no part in the others."""
    BEFORE_PUBLISH = "before publish"
    """The batch is at the trainer; its version is on no generator."""
    MID_SYNC = "mid weight sync"
    """A generator receives the version."""
    BEFORE_ACK = "after publish, before ack"
    """The version was sent, and a generator that has it has not confirmed that it serves it."""
    MID_CHECKPOINT = "mid checkpoint"
    """A checkpoint is begun and not sealed."""


WEIGHT_PHASES = {
    Moment.MID_SYNC: {generator_pb2.WEIGHT_PHASE_RECEIVING},
    Moment.BEFORE_ACK: {generator_pb2.WEIGHT_PHASE_STAGED, generator_pb2.WEIGHT_PHASE_COMMITTING},
}


async def reached(stack: Stack, run: dict[str, Any], moment: Moment, generator: str) -> None:
    """Return when the run is at `moment`; where that is about one generator, about this one."""
    where = generator if moment in WEIGHT_PHASES else "coordinator"
    async with stack.channel(where) as channel:
        looks: dict[Moment, Callable[[], Awaitable[bool]]] = {
            Moment.ROLLOUT: partial(owes_work, channel, generator),
            Moment.BEFORE_PUBLISH: partial(_trains, channel, run["run_id"]),
            Moment.MID_CHECKPOINT: _Saves(Path(run["directory"]) / "checkpoints"),
        }
        met = looks.get(moment) or partial(in_weight_phase, channel, WEIGHT_PHASES[moment])
        try:
            async with asyncio.timeout(LIMIT_S):
                while not await met():  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S:g} s for {moment} of {run['run_id']}") from None


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
