"""The services that one run has: its generators, its gangs, and what all runs share: rewards, judges, environments.

Invariants: every call carries the fence of the run's latest start. Only services that are leased to the run, or
free for it, get calls. A generator that the run must release gets no more work, and is released when its last group has
ended and no weights are being sent to it. Generators that leave memory to the trainer sleep for this run alone. The
generators of judges get no call from here: reward replicas ask them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.environment.v1.environment_pb2_grpc import EnvironmentServiceStub
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceStub
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceStub
from flotilla_core import ids, rpc, telemetry
from flotilla_core.errors import FlotillaError
from flotilla_core.roles import JUDGE, POLICY, named_role, process_name
from flotilla_core.rpc import Fence, Replica, ReplicaPool
from flotilla_core.telemetry import names

if TYPE_CHECKING:
    from flotilla.environment.v1.environment_pb2_grpc import EnvironmentServiceAsyncStub
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub
    from flotilla.reward.v1.reward_pb2_grpc import RewardServiceAsyncStub
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

Generator: TypeAlias = "Replica[GeneratorServiceAsyncStub]"

SLEEP_LIMIT_S = 30.0
"""The time for what is cancelled and still runs, then for gigabytes of memory to be unmapped or mapped."""


class Lessor(Protocol):
    """The fleet as a run sees it: it leases services to runs."""

    async def take_gang(self, run_id: str, role: str, slot: str) -> bool:
        """Lease a gang; return False where another run was faster."""

    async def give_gang_back(self, run_id: str, role: str) -> None:
        """Release the run's gang of a role, so that it can look for another one, or for the same one again."""

    async def end(self, run_id: str) -> None:
        """Release everything that the run has."""

    def others(self, run_id: str) -> int:
        """Return the number of other runs."""


class GeneratorUser(Protocol):
    """A part of a run that uses its generators and must stop when one is released."""

    def let_go(self, instance_id: str) -> None:
        """Stop using a generator, which no longer serves this run."""


class WeightMover(Protocol):
    """A part of a run that sends weights to its generators."""

    def moves_weights_to(self, instance_id: str) -> bool:
        """Return whether a sync that is under way includes this generator."""


class RunFleet:
    """One run's view of the fleet."""

    def __init__(
        self,
        run_id: str,
        connect: Callable[[str, Callable[[], Fence | None]], grpc.aio.Channel],
        lessor: Lessor,
        roles: Collection[str],
        judges: Collection[str] = (),
    ) -> None:
        """Take `roles`, those in which the run needs a gang, and the names of the judges of the fleet that it asks."""

        def channel(address: str) -> grpc.aio.Channel:
            return connect(address, lambda: self.fence)

        def waits(text: str) -> None:
            self.on_wait(text)

        self._run_id = run_id
        self._lessor = lessor
        self.on_wait: Callable[[str], None] = lambda text: None
        """Called with a text when a wait for a service has become long."""
        self.fence: Fence | None = None
        """The fence of the latest start, which goes with every call."""
        self.users: list[GeneratorUser] = []
        """The users of generators since the latest start."""
        self.weight_mover: WeightMover | None = None
        """The weight mover since the latest start."""
        self.generators: ReplicaPool[GeneratorServiceAsyncStub] = ReplicaPool(
            reg.SERVICE_KIND_GENERATOR, GeneratorServiceStub, channel, on_wait=waits
        )
        self.gangs: dict[str, ReplicaPool[TrainerServiceAsyncStub]] = {
            role: ReplicaPool(reg.SERVICE_KIND_TRAINER, TrainerServiceStub, channel, role=role, on_wait=waits)
            for role in roles
        }
        self.rewards: ReplicaPool[RewardServiceAsyncStub] = ReplicaPool(
            reg.SERVICE_KIND_REWARD, RewardServiceStub, channel, on_wait=waits
        )
        self.environments: ReplicaPool[EnvironmentServiceAsyncStub] = ReplicaPool(
            reg.SERVICE_KIND_ENVIRONMENT, EnvironmentServiceStub, channel, on_wait=waits
        )
        self.judges: dict[str, ReplicaPool[GeneratorServiceAsyncStub]] = {
            judge: ReplicaPool(
                reg.SERVICE_KIND_GENERATOR,
                GeneratorServiceStub,
                channel,
                role=named_role(JUDGE, judge),
                on_wait=waits,
            )
            for judge in judges
        }

    @property
    def trainers(self) -> ReplicaPool[TrainerServiceAsyncStub]:
        """Return the pool of the policy's gang."""
        return self.gangs[POLICY]

    @property
    def is_alone(self) -> bool:
        """Return whether there is no other run."""
        return self._lessor.others(self._run_id) == 0

    def begin(self, fence: Fence) -> None:
        """Start the run again under a new fence; the users of the previous start no longer use generators."""
        self.fence, self.users, self.weight_mover = fence, [], None

    async def gang(self, role: str, patience_s: float) -> Replica[TrainerServiceAsyncStub]:
        """Return the run's own gang of a role; wait until a free one can be leased."""
        pool = self.gangs[role]
        while True:
            await pool.wait_for(1, patience_s, f"a {process_name(role)}")
            # Another run may have been faster; then the gang belongs to that run.
            for replica in pool.replicas()[:1]:
                if await self._lessor.take_gang(self._run_id, role, replica.name):
                    return replica

    async def gang_lost(self, role: str, instance_id: str, why: str) -> None:
        """Release a lost gang: the run continues with a free one, else with this one once it is well again."""
        self.gangs[role].eject(instance_id, why, replaceable=False)
        await self._lessor.give_gang_back(self._run_id, role)

    async def judge(self, name: str, patience_s: float) -> list[Generator]:
        """Return the generators that hold a judge; wait until there is one."""
        await self.judges[name].wait_for(1, patience_s, f"judge {name}")
        return self.judges[name].replicas()

    def doubt_judge(self, name: str, why: str) -> None:
        """Have the generators of a judge show that they serve before they are asked again."""
        for replica in self.judges[name].replicas():
            self.judges[name].eject(replica.instance_id, why)

    async def update(
        self, snapshot: dict[str, reg.Registration], why_not: Callable[[reg.Registration], str]
    ) -> None:
        """Take in the services that exist now; `why_not` says why a service is not for this run."""
        ours = {key: one for key, one in snapshot.items() if not why_not(one)}
        for pool in self._pools():
            for replica in pool.everyone():
                if why := why_not(replica.registration):
                    pool.dismiss(replica.instance_id, why)
            await pool.update(ours)

    def is_last(self, instance_id: str) -> bool:
        """Return whether no other generator or reward replica may get work of the run, or environment with episodes."""
        plays = any(one.leases for one in self.environments.everyone())
        pools: list[list[Replica[Any]]] = [self.generators.replicas(), self.rewards.replicas()]
        pools += [self.environments.replicas()] if plays else []
        return any([one.instance_id for one in replicas] == [instance_id] for replicas in pools)

    def leave(self, slot: str, why: str) -> None:
        """Give no more work to a generator that the run must release."""
        for replica in self._generators_of(slot):
            self.generators.drain(replica.instance_id, why)
            for user in self.users:
                user.let_go(replica.instance_id)

    def forget(self, slot: str) -> None:
        """Drop a generator that was released; if it returns, it is a new one."""
        for replica in self._generators_of(slot):
            for user in self.users:
                user.let_go(replica.instance_id)
            self.generators.dismiss(replica.instance_id, "it was let go")

    def has_left(self, slot: str) -> bool:
        """Return whether nothing of the run is left on the generator."""
        return not any(
            replica.leases
            or (self.weight_mover is not None and self.weight_mover.moves_weights_to(replica.instance_id))
            for replica in self._generators_of(slot)
        )

    def replica(self, instance_id: str) -> Replica[Any] | None:
        """Return a replica that is no gang as the run sees it."""
        pools: tuple[ReplicaPool[Any], ...] = (self.generators, self.rewards, self.environments)
        replicas = (one for pool in pools for one in pool.everyone())
        return next((one for one in replicas if one.instance_id == instance_id), None)

    async def close(self) -> None:
        """Give everything back, and close every channel."""
        self.users, self.weight_mover = [], None
        await self._lessor.end(self._run_id)
        for pool in self._pools():
            await pool.close()

    def _generators_of(self, slot: str) -> list[Replica[GeneratorServiceAsyncStub]]:
        return [replica for replica in self.generators.everyone() if replica.name == slot]

    def _pools(self) -> Iterator[ReplicaPool[Any]]:
        yield self.generators
        yield from self.gangs.values()
        yield self.rewards
        yield from self.judges.values()
        yield self.environments


class SleepingGenerators:
    """The generators of one run that sleep while its trainer works.

    Every one that may get work of the run is asked, since each may share a GPU with a rank. One that does not fall
    asleep costs the run nothing but memory: the trainer measures what is free before each pass. One that does not wake
    gets no work until it has joined a weight group again, which wakes it. What was begun and not ended, by a failure or
    the death of the coordinator, is ended in the same way.
    """

    def __init__(
        self,
        run_id: str,
        ready: Callable[[], list[Generator]],
        let_go: Callable[[Generator, FlotillaError], None],
        warn: Callable[[str], None],
    ) -> None:
        """`let_go` is called with a generator that did not wake."""
        self._run_id = run_id
        self._ready = ready
        self._let_go = let_go
        self._warn = warn
        self._asked: list[Generator] = []
        """The generators that may sleep: one whose answer was lost may have fallen asleep."""
        self._asleep: set[str] = set()

    def sleeps(self, instance_id: str) -> bool:
        """Return whether this generator was put to sleep."""
        return instance_id in self._asleep

    async def put_to_sleep(self) -> None:
        """Put all generators to sleep."""
        replicas = self._asked = self._ready()
        with telemetry.span(names.RL_SLEEP, attributes={names.RUN_ID: self._run_id}) as span:
            request = gen.SleepRequest(run_id=self._run_id, request_id=ids.new_request_id())
            answers = await asyncio.gather(*(_asked(one.stub.Sleep, request) for one in replicas))
            freed = 0
            for replica, answer in zip(replicas, answers, strict=True):
                if isinstance(answer, FlotillaError):
                    self._warn(f"{replica.name} keeps the memory of its KV cache during the update: {answer}")
                else:
                    self._asleep.add(replica.instance_id)
                    freed += answer.freed_bytes
            span.set_attribute(names.BYTES, freed)

    async def wake(self) -> None:
        """Wake them."""
        replicas, self._asked = self._asked, []
        with telemetry.span(names.RL_WAKE, attributes={names.RUN_ID: self._run_id}):
            request = gen.WakeRequest(run_id=self._run_id, request_id=ids.new_request_id())
            answers = await asyncio.gather(*(_asked(one.stub.Wake, request) for one in replicas))
        self._asleep.clear()
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, FlotillaError):
                self._let_go(replica, answer)


async def _asked(method: Any, request: Any) -> Any:
    """Return the answer of one generator, or its error."""
    try:
        return await rpc.unary(method, request, timeout_s=SLEEP_LIMIT_S)
    except FlotillaError as error:
        return error
