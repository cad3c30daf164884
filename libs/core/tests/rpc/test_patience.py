"""An answer that takes long is waited for while its peer makes progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla_core import rpc
from flotilla_core.errors import DeadlineExceeded, Unavailable
from flotilla_core.rpc import patience
from flotilla_core.rpc.patience import Patience
from flotilla_testing.credentials import ours
from flotilla_testing.servers import serving

LIMIT_S = 20.0
IDLE_S = 0.5


class Slow(operate_pb2_grpc.OperateServiceServicer):
    """Answers `Check` when the test says, and says meanwhile what the test says."""

    def __init__(self) -> None:
        self.answers, self.called, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.doing: list[pb.Activity] = []
        self.looks = 0
        self.counts = False

    async def Check(self, request: Any, context: Any) -> pb.CheckResponse:
        self.called.set()
        try:
            await self.answers.wait()
        finally:
            self.left.set()
        return pb.CheckResponse()

    async def GetActivity(self, request: Any, context: Any) -> pb.GetActivityResponse:
        self.looks += 1
        if self.counts:
            self.doing = [pb.Activity(what=f"{self.looks} of 100", run_id="run")]
        return pb.GetActivityResponse(activities=self.doing)


@asynccontextmanager
async def slow_service() -> AsyncIterator[tuple[Slow, grpc.aio.Channel]]:
    slow = Slow()
    async with serving(slow) as address, rpc.connect(address, credential=ours()) as channel:
        yield slow, channel


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK_EVERY_S", 0.02)


def asking(channel: grpc.aio.Channel, told: list[str]) -> asyncio.Task[pb.CheckResponse]:
    stub = operate_pb2_grpc.OperateServiceStub(channel)
    call = rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=rpc.UNLIMITED_S)
    waiting = Patience(channel, "run", told.append).answer(call, idle_timeout_s=IDLE_S, where="the peer")
    return asyncio.create_task(waiting)


async def test_progress_keeps_a_call_alive_beyond_its_limit() -> None:
    told: list[str] = []
    async with slow_service() as (slow, channel):
        slow.counts = True
        call = asking(channel, told)
        done, _ = await asyncio.wait({call}, timeout=3 * IDLE_S)
        assert not done
        slow.answers.set()
        assert await asyncio.wait_for(call, LIMIT_S) == pb.CheckResponse()
    assert told[0].endswith("of 100") and told[-1] == "" and len(set(told)) == len(told) > 3


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        ([("reading", "run"), ("writing", "run")], "the last that it did: writing"),
        ([("reading", "another run")], "it did not say what it does"),
        ([], "it did not say what it does"),
    ],
)
async def test_a_peer_without_progress_is_given_up_with_its_last_words(
    doing: list[tuple[str, str]], words: str
) -> None:
    async with slow_service() as (slow, channel):
        slow.doing = [pb.Activity(what=what, run_id=run_id) for what, run_id in doing]
        with pytest.raises(DeadlineExceeded, match=rf"no progress for 0.5 s \(the peer\): {words}"):
            await asyncio.wait_for(asking(channel, []), LIMIT_S)
        await asyncio.wait_for(slow.left.wait(), LIMIT_S)


async def test_a_caller_that_is_cancelled_cancels_the_call() -> None:
    async with slow_service() as (slow, channel):
        call = asking(channel, [])
        await asyncio.wait_for(slow.called.wait(), LIMIT_S)
        call.cancel()
        await asyncio.wait({call})
        await asyncio.wait_for(slow.left.wait(), LIMIT_S)
        assert call.cancelled()


async def test_an_error_is_raised_as_it_is() -> None:
    async def broken() -> None:
        raise Unavailable("gone")

    with pytest.raises(Unavailable, match="gone"):
        await Patience(None).answer(broken(), idle_timeout_s=IDLE_S, where="the peer")
