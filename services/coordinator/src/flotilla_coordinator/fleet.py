"""The services of the stack as runs see them.

Invariants: every call carries the fence of the beginning that works now; one registry watch feeds every pool; a
generator is leased to at most one run at a time; health, not the registry, decides whether a replica is used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceStub
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceStub
from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_core.roles import POLICY, ROLES
from flotilla_core.rpc import Fence, Replica, ReplicaPool
from flotilla_core.service import Host

if TYPE_CHECKING:
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub
    from flotilla.reward.v1.reward_pb2_grpc import RewardServiceAsyncStub
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub


class Fleet:
    """Pools of generators, gangs by their role, and reward replicas."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._watch: asyncio.Task[None] | None = None
        self.registrations: dict[str, reg.Registration] = {}
        self.fence: Fence | None = None
        """Of the beginning that works now; it goes with every call."""
        self.generators: ReplicaPool[GeneratorServiceAsyncStub] = ReplicaPool(
            reg.SERVICE_KIND_GENERATOR,
            GeneratorServiceStub,
            self._connect,
            size="running_samples",
            overcommit=1.25,
        )
        self.gangs: dict[str, ReplicaPool[TrainerServiceAsyncStub]] = {
            role: ReplicaPool(reg.SERVICE_KIND_TRAINER, TrainerServiceStub, self._connect, role=role)
            for role in ROLES
        }
        self.trainers = self.gangs[POLICY]
        self.rewards: ReplicaPool[RewardServiceAsyncStub] = ReplicaPool(
            reg.SERVICE_KIND_REWARD, RewardServiceStub, self._connect, size="workers"
        )

    async def start(self) -> None:
        """Begin to follow the registry."""
        self._watch = asyncio.create_task(self._follow(), name="fleet watch")

    async def stop(self) -> None:
        """Stop following and close every channel."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        for pool in self._pools():
            await pool.close()

    def replica(self, reference: str) -> Replica[Any] | None:
        """A generator or a reward replica by its instance id or its slot's name; None where no pool knows it."""
        replicas: list[Replica[Any]] = [*self.generators.everyone(), *self.rewards.everyone()]
        found = (one for one in replicas if reference in (one.instance_id, one.name))
        return next(found, None)

    def drain(self, reference: str, *, busy: bool) -> Replica[Any]:
        """No more work for a replica; the last generator of a run that goes on is refused."""
        replica = self.replica(reference)
        if replica is None:
            raise NotFound(f"there is no replica {reference!r}", next_step="see `flotilla replicas list`")
        if busy and [one.instance_id for one in self.generators.replicas()] == [replica.instance_id]:
            raise FailedPrecondition(
                f"{replica.name} is the only generator that may get work",
                why="the run that goes on would wait for another one, and fail after ready_timeout_s",
                next_step="start another one first (`flotilla scale generator 2`), or stop the run",
            )
        for pool in (self.generators, self.rewards):
            pool.drain(replica.instance_id, "drained by a user")
        return replica

    def _connect(self, address: str) -> grpc.aio.Channel:
        return self._host.connect(address, fence=lambda: self.fence)

    def _pools(self) -> Iterator[ReplicaPool[Any]]:
        yield self.generators
        yield from self.gangs.values()
        yield self.rewards

    async def _follow(self) -> None:
        try:
            async for snapshot in self._host.registry.watch():
                self.registrations = snapshot
                for pool in self._pools():
                    await pool.update(snapshot)
        # A coordinator that no longer sees its fleet must not look healthy: it ends, and is started again.
        except Exception as error:  # noqa: BLE001
            self._host.failed(error)
