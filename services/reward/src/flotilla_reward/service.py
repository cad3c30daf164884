"""The reward service as the host runs it, and its calls on the wire.

Invariant: a call that waits for a worker, loads a file or scores gives signs of life, so its caller needs no guess of
how long that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.operate_pb2 import ProcessStacks
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from flotilla_core.config import RewardServiceConfig
from flotilla_core.errors import Unavailable
from flotilla_core.findings import failed, passed, warned
from flotilla_core.rpc import RpcServer
from flotilla_core.transfer import Files
from flotilla_reward import catalog, scoring
from flotilla_reward.answers import Workers
from flotilla_reward.judges.judge import Judges
from flotilla_workers.jail.jail import find

SERVICE_NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """RewardService on the wire.

    A call knows everything that it needs; calls are only counted, because a drain waits until none runs.
    """

    def __init__(self, pool: Workers, files: Files, judges: Judges | None = None) -> None:
        self._pool = pool
        self._judges = judges or Judges({})
        self._files = files
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def drain(self) -> None:
        """Score nothing new, and wait until every running call has ended."""
        self._draining = True
        await self._idle.wait()

    async def ListRewards(
        self, request: reward_pb2.ListRewardsRequest, context: Context
    ) -> reward_pb2.ListRewardsResponse:
        rewards = [*catalog.list_rewards(), *self._judges.infos()]
        return reward_pb2.ListRewardsResponse(rewards=rewards, isolation=self._pool.jail.isolation)

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: Context
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        if self._draining:
            raise Unavailable("the replica is draining")
        with self._counted():
            code = {
                spec.reward: await self._files.here(spec.code, request.run_id)
                for spec in request.rewards
                if spec.HasField("code")
            }
            terms = scoring.resolve(request.rewards, code, self._judges)
            async with aclosing(scoring.load(terms, self._pool, request.run_id)) as signs:
                async for sign in signs:
                    yield sign
            yield scoring.facts_of(terms, self._pool)
            total_steps = request.total_steps if request.HasField("total_steps") else None
            run = scoring.Run(request.run_id, total_steps)
            responses = scoring.score_items(request.items, terms, self._pool, run)
            async with aclosing(responses):
                async for response in responses:
                    yield response

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


class RewardHostService:
    """Owns the worker pool; calls come and go on the host's server."""

    def __init__(self, config: RewardServiceConfig, files: Files, judges: Judges) -> None:
        self._workers = config.workers
        self._pool = Workers(config.workers, partial(find, config.isolation))
        self._judges = judges
        self._servicer = RewardServicer(self._pool, files, self._judges)

    def add_to(self, server: RpcServer) -> None:
        add = reward_pb2_grpc.add_RewardServiceServicer_to_server
        server.add(add, self._servicer, SERVICE_NAME)

    async def start(self) -> None:
        await self._pool.start()

    def describe(self, registration: Registration) -> None:
        registration.capacity["workers"] = self._workers
        registration.isolation = self._pool.jail.isolation

    async def check(self) -> list[Finding]:
        alive, dead = len(self._pool.pids), self._pool.dead
        found = f"{alive} alive, {dead} dead, {self._pool.replaced} replaced since the start"
        findings = [passed("reward workers", found)]
        if dead:
            # A worker that was killed comes back with the next sample that needs it.
            short = warned if alive else failed
            findings = [
                short("reward workers", found, "Read the log of this service: user code may crash or hang.")
            ]
        findings += [self._pool.jail.finding, *self._judges.findings()]
        if hidden := catalog.CATALOG.hidden_entry_points():
            found = f"{', '.join(hidden)}: hidden by the built-in reward of the same name"
            findings.append(warned("reward entry points", found, "Give the entry point another name."))
        return findings

    async def dump_stacks(self) -> list[ProcessStacks]:
        """Workers run user code that may be stuck: their kernel state is all that is safe to read."""
        return [
            ProcessStacks(process=worker, pid=pid, text=await asyncio.to_thread(_state_of, pid))
            for worker, pid in self._pool.pids.items()
        ]

    async def drain(self, grace_s: float) -> None:
        """Let running calls end; the host waits no longer than `grace_s`."""
        await self._servicer.drain()

    async def stop(self) -> None:
        await self._pool.stop()
        await self._judges.close()


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError as error:
        return f"gone: {error}"
