"""A caller whose place was taken is refused, whatever it calls; everybody else is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla.generator.v1 import generator_pb2_grpc
from flotilla.generator.v1.generator_pb2 import GenerateManyRequest, GenerateManyResponse
from flotilla_core import errors, rpc
from flotilla_core.rpc import Fence
from flotilla_core.rpc.fence import FENCE_HEADER, NewestFences
from flotilla_core.trust import Credential
from flotilla_core.trust.roles import LADDER
from flotilla_testing.credentials import ours, role_credential, stranger
from flotilla_testing.servers import serving

SERVICE = "flotilla.common.v1.OperateService"


class Operate(operate_pb2_grpc.OperateServiceServicer):
    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        return pb.CheckResponse()

    async def TailLog(self, request: pb.TailLogRequest, context: Any) -> AsyncIterator[pb.TailLogResponse]:
        yield pb.TailLogResponse(line="a line")


class Generator(generator_pb2_grpc.GeneratorServiceServicer):
    async def GenerateMany(
        self, request_iterator: AsyncIterator[GenerateManyRequest], context: Any
    ) -> AsyncIterator[GenerateManyResponse]:
        async for _ in request_iterator:
            yield GenerateManyResponse()


class Caller:
    """One coordinator; its fence may change under its channel."""

    def __init__(self, address: str, fence: Fence | None, credential: Credential | None = None) -> None:
        self.fence = fence
        self.channel = rpc.connect(address, credential=credential or ours(), fence=lambda: self.fence)
        self.stub = operate_pb2_grpc.OperateServiceStub(self.channel)

    async def check(self) -> None:
        await rpc.unary(self.stub.Check, pb.CheckRequest(), timeout_s=5)

    async def lines(self) -> list[str]:
        stream = rpc.server_stream(self.stub.TailLog, pb.TailLogRequest(), idle_timeout_s=5)
        return [reply.line async for reply in stream]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with serving(Operate(), Generator()) as served:
        yield served


async def test_a_caller_behind_the_newest_fence_is_refused_in_every_kind_of_call(address: str) -> None:
    old, new = (Caller(address, Fence("ledger", 1, "run", number)) for number in (3, 4))
    await old.check()
    await new.check()
    with pytest.raises(errors.StaleVersion, match="fence 3 is behind 4"):
        await old.check()
    with pytest.raises(errors.StaleVersion, match="TailLog"):
        await old.lines()
    await new.check()
    old.fence = Fence("ledger", 1, "run", 5)  # its next beginning
    assert await old.lines() == ["a line"]
    with pytest.raises(errors.StaleVersion):
        await new.check()
    await old.channel.close()
    await new.channel.close()


async def test_runs_of_one_coordinator_call_side_by_side_until_another_one_owns_the_ledger(
    address: str,
) -> None:
    callers = [Caller(address, Fence("ledger", 2, run, number)) for run, number in (("a", 7), ("b", 3))]
    for caller in (*callers, *callers):
        await caller.check()
    later = Caller(address, Fence("ledger", 3, "b", 4))
    await later.check()
    for caller in callers:
        with pytest.raises(errors.StaleVersion, match="epoch 2, is behind epoch 3"):
            await caller.check()
    callers[0].fence = Fence("ledger", 3, "a", 8)  # goes on under the new owner
    await callers[0].check()
    for caller in (*callers, later):
        await caller.channel.close()


async def test_a_call_that_goes_on_is_refused_once_its_place_is_taken(address: str) -> None:
    old, new = (Caller(address, Fence("ledger", 1, "run", number)) for number in (3, 4))
    said: asyncio.Queue[GenerateManyRequest] = asyncio.Queue()

    async def parts() -> AsyncIterator[GenerateManyRequest]:
        while True:
            yield await said.get()

    generate = generator_pb2_grpc.GeneratorServiceStub(old.channel).GenerateMany
    async with aclosing(rpc.duplex(generate, parts(), idle_timeout_s=5)) as call:
        said.put_nowait(GenerateManyRequest())
        await anext(call)
        await new.check()
        said.put_nowait(GenerateManyRequest())
        with pytest.raises(errors.StaleVersion, match="fence 3 is behind 4"):
            await anext(call)
    await old.channel.close()
    await new.channel.close()


async def test_another_ledger_and_callers_without_a_fence_are_served(address: str) -> None:
    fences = (Fence("a", 2, "run", 9), Fence("b", 1, "run", 1), None)
    callers = [Caller(address, fence) for fence in fences]
    for caller in callers:
        await caller.check()
        await caller.channel.close()


async def test_a_call_that_is_refused_moves_no_fence(address: str, tmp_path: Path) -> None:
    own = Caller(address, Fence("ledger", 2, "run", 3))
    later = Fence("ledger", 3, "run", 4)
    foreign, friend = Caller(address, later, stranger(tmp_path)), Caller(address, later)
    await own.check()
    with pytest.raises(errors.Unavailable, match="is foreign"):
        await foreign.check()
    with pytest.raises(errors.Unavailable, match="is foreign"):
        await foreign.lines()
    await own.check()
    with pytest.raises(errors.InvalidRequest, match="no deadline"):
        await rpc.unary(_without_deadline(friend.stub.Check), pb.CheckRequest(), timeout_s=5)
    with pytest.raises(errors.Unimplemented):
        await rpc.unary(friend.stub.DumpStacks, pb.DumpStacksRequest(), timeout_s=5)
    with pytest.raises(errors.InvalidRequest, match="not a valid message"):
        await rpc.unary(friend.channel.unary_unary(f"/{SERVICE}/Check"), b"\xff\xff", timeout_s=5)
    await own.check()
    await friend.check()
    with pytest.raises(errors.StaleVersion):
        await own.check()
    for caller in (own, foreign, friend):
        await caller.channel.close()


@pytest.mark.parametrize("role", LADDER)
async def test_no_role_moves_a_fence(address: str, role: str) -> None:
    own = Caller(address, Fence("ledger", 1, "run", 1))
    await own.check()
    holder = Caller(address, None, role_credential(ours().path.parent, role, "eve"))
    for fence in (
        Fence("ledger", 1001, "run", 1),  # the largest leap
        Fence("ledger", 1, "run", 2),
        Fence("ledger", 1, "another run", 1),
        Fence("ledger", 1, "run", 1),
        Fence("another", 1, "run", 1),
    ):
        holder.fence = fence
        for call in (holder.check, holder.lines):
            with pytest.raises(errors.PermissionDenied, match="carries a fence") as refused:
                await call()
            assert "without the header flotilla-fence" in str(refused.value)
        await own.check()
    holder.fence = None
    await holder.check()
    assert await holder.lines() == ["a line"]
    await own.channel.close()
    await holder.channel.close()


def _without_deadline(method: Any) -> Any:
    return lambda request, timeout, metadata: method(request, metadata=metadata)


@pytest.mark.parametrize(
    "header",
    [
        f"{2**64} 1 ledger run",
        f"1 {2**64} ledger run",
        "1" * 5000 + " 1 ledger run",
        "1002 3 ledger run",
        "-1 1 ledger run",
        "1 1 ledger",
        f"1 1 {'l' * 65} run",
        f"1 1 ledger {'r' * 129}",
        "",
    ],
    ids=lambda header: header[:24] or "empty",
)
async def test_a_fence_that_cannot_be_right_is_refused_and_locks_nobody_out(
    address: str, header: str
) -> None:
    own = Caller(address, Fence("ledger", 1, "run", 1))
    await own.check()
    async with rpc.connect(address, credential=ours()) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/Check")
        with pytest.raises(grpc.aio.AioRpcError, match="flotilla-fence") as caught:
            await call(b"", timeout=5, metadata=((FENCE_HEADER, header),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await own.check()
    await own.channel.close()


def test_what_a_service_remembers_of_ledgers_and_runs_is_bounded() -> None:
    fences = NewestFences()
    for number in range(3000):
        fences.admit(Fence("ledger", 1, f"run-{number}", 1), "call")
        fences.admit(Fence(f"ledger-{number}", 1, "run", 1), "call")
        fences.admit(Fence("ledger", 1, "run", 2), "call")
    remembered = fences._ledgers
    assert len(remembered) <= 16
    assert len(remembered["ledger"].numbers) <= 1024
    with pytest.raises(errors.StaleVersion):
        fences.admit(Fence("ledger", 1, "run", 1), "call")
