"""A reward service that is told to drain, as a process with a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flotilla.common.v1.operate_pb2 import DrainRequest
from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla_core import rpc
from flotilla_core.errors import Unavailable
from flotilla_testing.reward_process import LIMIT_S, RewardProcess, exists, reward_process

SLOW = """
import time
from pathlib import Path

def slow(prompt, response, answer, info):
    folder = Path(__file__).parent
    (folder / "begun").touch()
    while not (folder / "released").exists():
        time.sleep(0.01)
    time.sleep(2)
    return 1.0
"""
"""Scores for two seconds once it is released, longer than any server waits for answers that are on their way."""


class Replica:
    """A running reward service, and a file with a slow reward."""

    def __init__(self, folder: Path, service: RewardProcess) -> None:
        self.folder = folder
        self._service = service

    async def score(self, reward: str) -> list[float]:
        outcomes = await self._service.outcomes(reward, ["1"], timeout_s=600)
        return [outcome.value.components[0].value for outcome in outcomes]

    async def slow_call(self) -> asyncio.Task[list[float]]:
        """Start a call whose reward runs when this returns."""
        call = asyncio.create_task(self.score(f"{self.folder / 'slow.py'}:slow"))
        await exists(self.folder / "begun")
        return call

    async def drain(self, grace_s: int) -> None:
        request = DrainRequest()
        request.grace.FromSeconds(grace_s)
        await rpc.unary(OperateServiceStub(self._service.channel).Drain, request, timeout_s=LIMIT_S)

    async def refusal(self) -> str:
        """Return why a call is refused, once one is."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await self.score("exact")
                except Unavailable as error:
                    return str(error)

    async def ended(self) -> int:
        return await asyncio.wait_for(self._service.process.wait(), LIMIT_S)


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    (tmp_path / "slow.py").write_text(SLOW)
    async with reward_process(tmp_path) as service:
        yield Replica(tmp_path, service)


async def test_a_running_call_is_answered_within_the_grace_and_the_service_ends_with_it(
    replica: Replica,
) -> None:
    call = await replica.slow_call()
    await replica.drain(grace_s=600)
    assert "the replica is draining" in await replica.refusal()
    (replica.folder / "released").touch()
    assert await asyncio.wait_for(call, LIMIT_S) == [1.0]
    assert await replica.ended() == 0


async def test_a_call_that_outlasts_the_grace_is_cut(replica: Replica) -> None:
    call = await replica.slow_call()
    await replica.drain(grace_s=0)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(call, LIMIT_S)
    assert await replica.ended() == 0


async def test_a_service_without_a_call_ends_at_once(replica: Replica) -> None:
    assert await replica.score("exact") == [1.0]
    await replica.drain(grace_s=600)
    assert await replica.ended() == 0
