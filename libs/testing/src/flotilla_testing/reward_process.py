"""A reward service as a process of its own, with a real NATS server, that is asked over gRPC."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
from flotilla_core import rpc
from flotilla_core.bus import NatsServer
from flotilla_core.config import BindConfig
from flotilla_core.files import make_private_folder
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_core.trust.authority import make_credential

LIMIT_S = 30.0


class RewardProcess:
    """A running reward service and a channel to it."""

    def __init__(self, process: ProcessGroup, address: str, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.address = address
        self.channel = channel

    async def outcomes(
        self,
        reward: str,
        responses: Sequence[str],
        *,
        answer: str = "1",
        run_id: str = "",
        timeout_s: float = 10.0,
        parameters: dict[str, Any] | None = None,
        trusted: bool = False,
    ) -> list[pb.ScoreOutcome]:
        """Return one outcome for each response, in their order."""
        struct = Struct()
        struct.update(parameters or {})
        spec = pb.RewardSpec(reward=reward, parameters=struct, trusted=trusted)
        spec.timeout.FromMilliseconds(round(timeout_s * 1000))
        items = [
            pb.ScoreItem(sample_id=str(index), response=response, answer=answer)
            for index, response in enumerate(responses)
        ]
        request = pb.ScoreRequest(run_id=run_id, items=items, rewards=[spec])
        stream = rpc.server_stream(RewardServiceStub(self.channel).Score, request, idle_timeout_s=LIMIT_S)
        found = {outcome.sample_id: outcome async for response in stream for outcome in response.outcomes}
        return [found[item.sample_id] for item in items]


@asynccontextmanager
async def reward_process(
    folder: Path, *, workers: int = 2, isolation: Mapping[str, Any] | None = None
) -> AsyncIterator[RewardProcess]:
    """Start a reward service whose state is below the folder, and end it; functions run in no jail by default."""
    section = {"workers": workers, "isolation": {"unsafe": True} if isolation is None else isolation}
    async with service_process(folder, "reward", section) as started:
        yield RewardProcess(*started)


@asynccontextmanager
async def service_process(
    folder: Path, kind: str, section: Mapping[str, Any]
) -> AsyncIterator[tuple[ProcessGroup, str, grpc.aio.Channel]]:
    """Start a service with its section of the stack, and end it; gives its address and a channel to it, too."""
    directory = folder / "state" / "tested"
    make_private_folder(directory)
    credential = make_credential(BindConfig(), directory)
    stack = folder / "stack.yaml"
    stack.write_text(json.dumps({"name": "tested", "state_dir": f"{folder}/state", kind: section}))
    nats = await NatsServer.start(directory / "nats", credential=credential)
    try:
        process = await ProcessGroup.start(
            [sys.executable, "-m", f"flotilla_{kind}.main", "--stack", str(stack), "--nats", nats.url]
        )
        try:
            announced = directory / "instances" / f"{kind}-0.json"
            await exists(announced)
            address = json.loads(announced.read_text())["address"]
            async with rpc.connect(address, credential=credential, dial_s=LIMIT_S) as channel:
                await _serves(channel)
                yield process, address, channel
        finally:
            await process.stop(LIMIT_S)
    finally:
        await nats.stop()


async def exists(file: Path) -> None:
    """Wait for a file."""
    async with asyncio.timeout(LIMIT_S):
        while not file.exists():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.02)


async def _serves(channel: grpc.aio.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    async with aclosing(rpc.server_stream(health.Watch, request, idle_timeout_s=LIMIT_S)) as changes:
        async for change in changes:
            if change.status == health_pb2.HealthCheckResponse.SERVING:
                return
