"""kill -9 of a generator at a named phase of its life.

Invariants: the phase is seen from outside, by the same calls that operators have, so the product holds no hook for
tests; every wait is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

import grpc

from flotilla.coordinator.v1 import coordinator_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from flotilla.generator.v1 import generator_pb2
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceStub
from flotilla_core.rpc import unary
from flotilla_testing.stack import Stack, wait_until

PHASES = ("decoding", "broadcast", "commit")
WEIGHT_PHASES = {
    "broadcast": {generator_pb2.WEIGHT_PHASE_RECEIVING},
    "commit": {generator_pb2.WEIGHT_PHASE_COMMITTING},
}
LOOK_EVERY_S = 0.001
LIMIT_S = 120.0


async def kill_inside(stack: Stack, name: str, phase: str) -> None:
    """Kill the replica with SIGKILL as soon as it is seen inside `phase`."""
    process = stack.process(name)
    decoding = phase == "decoding"
    look = (
        partial(owes_work, name=name) if decoding else partial(in_weight_phase, phases=WEIGHT_PHASES[phase])
    )
    where = "coordinator" if decoding else name
    async with asyncio.timeout(LIMIT_S), stack.channel(where) as channel:
        while not await look(channel):  # noqa: ASYNC110 - the phase of another process
            await asyncio.sleep(LOOK_EVERY_S)
    process.kill()


async def in_weight_phase(channel: grpc.aio.Channel, phases: Collection[int]) -> bool:
    """Return whether the generator behind `channel` is in one of these."""
    request = generator_pb2.GetWeightStatusRequest()
    return (await unary(GeneratorServiceStub(channel).GetWeightStatus, request, timeout_s=10)).phase in phases


async def owes_work(channel: grpc.aio.Channel, name: str) -> bool:
    """Return whether the coordinator behind `channel` waits for samples of this replica."""
    request = coordinator_pb2.ListServicesRequest()
    reply = await unary(CoordinatorServiceStub(channel).ListServices, request, timeout_s=10)
    return any(s.registration.name == name and s.outstanding_tokens for s in reply.services)


def wait_for_work(stack: Stack, run: dict[str, Any], name: str) -> None:
    """Wait until the replica that has this name now has taken part in a whole step."""
    done = len(stack.metrics(run))
    wait_until(
        f"{name} at work",
        lambda: any(f"generator/{name}/samples" in step for step in stack.metrics(run)[done + 1 :]),
        LIMIT_S,
    )
