"""An environment service as a process of its own, whose episodes are played by the coordinator's client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.environment.v1.environment_pb2_grpc import EnvironmentServiceStub
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.rpc import ReplicaPool
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_testing.reward_process import service_process


class EnvironmentProcess:
    """A running environment service, a channel to it, and a pool that has it alone."""

    def __init__(self, process: ProcessGroup, channel: grpc.aio.Channel, pool: ReplicaPool[Any]) -> None:
        self.process = process
        self.channel = channel
        self.pool = pool


@asynccontextmanager
async def environment_process(
    folder: Path, *, workers: int = 1, isolation: Mapping[str, Any] | None = None
) -> AsyncIterator[EnvironmentProcess]:
    """Start an environment service, and end it; environments of users run in no jail by default."""
    section = {"workers": workers, "isolation": {"unsafe": True} if isolation is None else isolation}
    async with service_process(folder, "environment", section) as (process, address, channel):
        pool = await pool_of(address, lambda _: channel)
        yield EnvironmentProcess(process, channel, pool)


async def pool_of(address: str, connect: Callable[[str], grpc.aio.Channel]) -> ReplicaPool[Any]:
    """Return a pool with one replica."""
    pool: ReplicaPool[Any] = ReplicaPool(reg.SERVICE_KIND_ENVIRONMENT, EnvironmentServiceStub, connect)
    one = reg.Registration(
        kind=reg.SERVICE_KIND_ENVIRONMENT,
        instance_id="environment-0-a",
        name="environment-0",
        address=address,
        state=reg.INSTANCE_STATE_READY,
        protocol_version=PROTOCOL_VERSION,
    )
    await pool.update({one.instance_id: one})
    return pool
