"""A clock that is wrong for a while costs a service nothing once it is right again."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla.common.v1.registration_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    Registration,
)
from flotilla_core import rpc
from flotilla_core.bus import Bus, NatsServer, Registry
from flotilla_core.config import BindConfig
from flotilla_core.trust import RegistrationSigner, RegistrationVerifier, calls

SERVICE = "flotilla.common.v1.OperateService"
S = 10**9
HEARTBEAT_S = 5
JUMP_S = 12
JUMPS_S = (-4000, -305, -300, -200, -2, 2, 200, 295, 299, 300, 301, 305, 309, 311, 320, 400, 4000)


class Clock:
    """The clock of a host, which may be wrong by some seconds."""

    def __init__(self, wrong_by_s: float = 0.0) -> None:
        self.now_s = 1_000_000.0
        self.wrong_by_s = wrong_by_s

    def __call__(self) -> int:
        return int((self.now_s + self.wrong_by_s) * S)


@pytest.mark.parametrize("jump_s", JUMPS_S)
@pytest.mark.parametrize("apart_s", [-4, 0, 4])
@pytest.mark.parametrize("whose", ["service", "reader"])
def test_an_instance_is_heard_soon_after_the_end_of_a_jump(jump_s: float, apart_s: float, whose: str) -> None:
    theirs, ours = Clock(), Clock(apart_s)
    before = {"service": theirs, "reader": ours}[whose].wrong_by_s
    signer, reader = RegistrationSigner("secret", theirs), RegistrationVerifier("secret", ours)
    own = Registration(instance_id="own", state=INSTANCE_STATE_READY)
    heard = []
    for second in range(120):
        theirs.now_s = ours.now_s = 1_000_000.0 + second
        jumped = theirs if whose == "service" else ours
        jumped.wrong_by_s = before + (jump_s if 30 <= second < 30 + JUMP_S else 0)
        if second % HEARTBEAT_S == 0 and reader.read("own", signer.sign(own)) == own:
            heard.append(second)
    silent_s = max(later - sooner for sooner, later in itertools.pairwise([*heard, 120]))
    assert silent_s <= JUMP_S + 4 * HEARTBEAT_S


async def test_a_call_waits_until_the_clock_of_its_service_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def jumps() -> int:
        nonlocal looks
        looks += 1
        return time.time_ns() // 1_000_000 + (3_600_000 if looks <= 2 else 0)

    class Operate(operate_pb2_grpc.OperateServiceServicer):
        async def Check(self, request: pb.CheckRequest, context: object) -> pb.CheckResponse:
            return pb.CheckResponse()

    server = rpc.RpcServer(BindConfig(), token="secret")
    server.add(operate_pb2_grpc.add_OperateServiceServicer_to_server, Operate(), SERVICE)
    address = await server.start()
    monkeypatch.setattr(calls, "_now_ms", jumps)
    async with rpc.connect(address, token="secret") as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=30)
    assert looks == 3
    await server.stop(0)


async def test_what_a_service_says_is_heard_again_once_its_clock_is_right(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path)
    wrong_by_ns = 0
    service, watcher = [await Bus.connect(server.url, server.login) for _ in range(2)]
    registry = Registry(service, "secret", heartbeat_s=0.05, now_ns=lambda: time.time_ns() + wrong_by_ns)
    try:
        async with aclosing(Registry(watcher, "secret").watch()) as views, asyncio.timeout(20):
            await registry.announce(Registration(instance_id="own", state=INSTANCE_STATE_READY))
            while "own" not in (await anext(views)):
                pass
            wrong_by_ns = 3600 * S
            await registry.update(state=INSTANCE_STATE_DRAINING)  # signed by the wrong clock: nobody takes it
            wrong_by_ns = 0
            while (await anext(views))["own"].state != INSTANCE_STATE_DRAINING:
                pass
    finally:
        await registry.withdraw()
        await service.close()
        await watcher.close()
        await server.stop()
