"""A reward service that is told to drain, as a process with a real NATS server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla.common.v1.operate_pb2 import DrainRequest
from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla_core import rpc
from flotilla_core.bus import NatsServer
from flotilla_core.config import BindConfig
from flotilla_core.errors import Unavailable
from flotilla_core.files import make_private_folder
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_core.trust import make_token

LIMIT_S = 30.0
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
    """A running reward service, its channel, and a file with a slow reward."""

    def __init__(self, folder: Path, process: ProcessGroup, channel: grpc.aio.Channel) -> None:
        self.folder = folder
        self.process = process
        self._channel = channel

    async def score(self, reward: str) -> list[float]:
        request = pb.ScoreRequest(
            items=[pb.ScoreItem(sample_id="run/0/0/0", response="1", answer="1")],
            rewards=[pb.RewardSpec(reward=reward, weight=1)],
        )
        request.rewards[0].timeout.FromSeconds(600)
        stream = rpc.server_stream(RewardServiceStub(self._channel).Score, request, idle_timeout_s=LIMIT_S)
        return [outcome.value.total async for response in stream for outcome in response.outcomes]

    async def slow_call(self) -> asyncio.Task[list[float]]:
        """Start a call whose reward runs when this returns."""
        call = asyncio.create_task(self.score(f"{self.folder / 'slow.py'}:slow"))
        await exists(self.folder / "begun")
        return call

    async def drain(self, grace_s: int) -> None:
        request = DrainRequest()
        request.grace.FromSeconds(grace_s)
        await rpc.unary(OperateServiceStub(self._channel).Drain, request, timeout_s=LIMIT_S)

    async def refusal(self) -> str:
        """Return why a call is refused, once one is."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await self.score("exact")
                except Unavailable as error:
                    return str(error)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)


async def exists(file: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not file.exists():
            await asyncio.sleep(0.02)


async def serves(channel: grpc.aio.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    async with aclosing(rpc.server_stream(health.Watch, request, idle_timeout_s=LIMIT_S)) as changes:
        async for change in changes:
            if change.status == health_pb2.HealthCheckResponse.SERVING:
                return


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    directory = tmp_path / "state" / "drained"
    make_private_folder(directory)
    token = make_token(BindConfig(), directory)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "stack.yaml").write_text(f"name: drained\nstate_dir: {tmp_path}/state\n")
    nats = await NatsServer.start(directory / "nats")
    command = [sys.executable, "-m", "flotilla_reward.main", "--stack", str(tmp_path / "stack.yaml")]
    process = await ProcessGroup.start([*command, "--nats", nats.url])
    announced = directory / "instances" / "reward-0.json"
    await exists(announced)
    async with rpc.connect(json.loads(announced.read_text())["address"], token=token) as channel:
        await serves(channel)
        yield Replica(tmp_path, process, channel)
    await process.stop(0)
    await nats.stop()


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
