"""Servers and calls of `flotilla_core.rpc`, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from flotilla_core import errors, rpc
from flotilla_core.config import BindConfig
from flotilla_testing.credentials import ours
from flotilla_testing.servers import serving

SERVICE = "flotilla.common.v1.OperateService"


class Operate(operate_pb2_grpc.OperateServiceServicer):
    """Behaviour for each kind of ending."""

    def __init__(self) -> None:
        self.calls = 0
        self.away_for = 0
        self.attempts: list[str] = []
        self.error: Exception | None = None
        self.stream_ended = asyncio.Event()

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        self.calls += 1
        metadata = dict(context.invocation_metadata())
        self.attempts.append(metadata.get("flotilla-attempt", "1"))
        if self.calls <= self.away_for:
            raise errors.Unavailable("booting")
        if self.error is not None:
            raise self.error
        return pb.CheckResponse()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        await asyncio.Event().wait()
        return pb.DrainResponse()

    async def Profile(self, request: pb.ProfileRequest, context: Any) -> pb.ProfileResponse:
        return pb.ProfileResponse(collapsed_stacks="x" * request.samples_per_second)

    async def TailLog(self, request: pb.TailLogRequest, context: Any) -> AsyncIterator[pb.TailLogResponse]:
        try:
            for number in range(request.lines):
                yield pb.TailLogResponse(line=str(number))
            if self.error is not None:
                raise self.error
            if request.follow:
                await asyncio.Event().wait()
        finally:
            self.stream_ended.set()


class Peer:
    """A running server and a client for it."""

    def __init__(self, servicer: Operate, server: rpc.RpcServer, address: str) -> None:
        self.servicer, self.server, self.address = servicer, server, address
        self.channel = rpc.connect(address, credential=ours())
        self.stub = operate_pb2_grpc.OperateServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)


async def start(bind: BindConfig | None = None) -> Peer:
    servicer = Operate()
    server = rpc.RpcServer(bind or BindConfig(), credential=ours())
    server.add(operate_pb2_grpc.add_OperateServiceServicer_to_server, servicer, SERVICE)
    return Peer(servicer, server, await server.start())


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    one = await start()
    yield one
    await one.channel.close()
    await one.server.stop(0)


async def failure(call: Any) -> errors.FlotillaError:
    with pytest.raises(errors.FlotillaError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("kind", errors.FlotillaError.__subclasses__())
async def test_every_error_crosses_a_call_whole(kind: type[errors.FlotillaError], peer: Peer) -> None:
    peer.servicer.error = kind("what", where="where", why="why, naïvely", next_step="next.")
    caught = await failure(rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=5, attempts=1))
    assert type(caught) is kind
    assert str(caught) == "what (where): why, naïvely. next."


async def test_a_long_error_still_arrives(peer: Peer) -> None:
    peer.servicer.error = errors.InvalidConfig("ü" * 50_000, why="y" * 50_000)
    caught = await failure(rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=5))
    assert isinstance(caught, errors.InvalidConfig)
    assert caught.what.startswith("üüü")


async def test_an_unexpected_exception_is_internal_with_the_traceback(peer: Peer) -> None:
    peer.servicer.error = ZeroDivisionError("division by zero")
    caught = await failure(rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=5))
    assert isinstance(caught, errors.Internal)
    assert "ZeroDivisionError: division by zero" in caught.why
    assert any("in Check" in note for note in caught.__notes__)


async def test_a_method_that_a_service_lacks_is_named(peer: Peer) -> None:
    caught = await failure(rpc.unary(peer.stub.GetActivity, pb.GetActivityRequest(), timeout_s=5))
    assert isinstance(caught, errors.Unimplemented)
    assert "GetActivity" in str(caught)


async def test_bytes_that_are_no_message_tell_nothing_of_our_insides(peer: Peer) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peer.channel.unary_unary(f"/{SERVICE}/Drain")(b"\xff\xff\xff", timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"the request is not a valid message (/{SERVICE}/Drain)"


async def test_a_refused_call_leaves_nothing_to_the_garbage_collector(peer: Peer) -> None:
    wrong = peer.channel.unary_unary(f"/{SERVICE}/Drain")

    async def refused(request: bytes) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await wrong(request, timeout=5)
        with pytest.raises(errors.Unimplemented):
            await rpc.unary(peer.stub.GetActivity, pb.GetActivityRequest(), timeout_s=5)
        with pytest.raises(errors.InvalidRequest):
            stream = rpc.server_stream(peer.stub.TailLog, pb.TailLogRequest(lines=2**31), idle_timeout_s=5)
            await anext(stream)

    def calls_alive() -> int:
        return sum(type(one).__name__ == "_ServicerContext" for one in gc.get_objects())

    await refused(b"\xff")
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await refused(b"\xff" * 1000)
        await asyncio.sleep(0)
        assert calls_alive() < 5
    finally:
        gc.enable()


async def test_a_call_without_a_deadline_is_refused(peer: Peer) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no deadline"):
        await peer.stub.Check(pb.CheckRequest())


async def test_unavailable_is_tried_again_and_the_attempt_travels(peer: Peer) -> None:
    peer.servicer.away_for = 2
    await rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=10)
    assert peer.servicer.attempts == ["1", "2", "3"]


async def test_retries_end_after_their_attempts(peer: Peer) -> None:
    peer.servicer.away_for = 99
    caught = await failure(rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=10, attempts=2))
    assert isinstance(caught, errors.Unavailable)
    assert peer.servicer.calls == 2


async def test_other_errors_are_not_tried_again(peer: Peer) -> None:
    peer.servicer.error = errors.StaleVersion("old")
    await failure(rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=10))
    assert peer.servicer.calls == 1


async def test_a_silent_service_ends_in_a_deadline_that_names_the_call(peer: Peer) -> None:
    caught = await failure(rpc.unary(peer.stub.Drain, pb.DrainRequest(), timeout_s=0.2))
    assert isinstance(caught, errors.DeadlineExceeded)
    assert str(caught) == f"no answer within 0.2 s (/{SERVICE}/Drain)"


async def test_a_call_that_a_stopping_server_cancels_is_unavailable(peer: Peer) -> None:
    call = asyncio.create_task(rpc.unary(peer.stub.Drain, pb.DrainRequest(), timeout_s=10, attempts=1))
    await rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=5)
    await peer.server.stop(0)
    assert isinstance(await failure(call), errors.Unavailable)


async def test_a_closed_channel_fails_its_calls_and_cancels_no_task(peer: Peer) -> None:
    call = asyncio.create_task(rpc.unary(peer.stub.Drain, pb.DrainRequest(), timeout_s=10, attempts=1))
    await rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=5)
    await peer.channel.close()
    assert isinstance(await failure(call), errors.Unavailable)


async def test_a_call_on_a_channel_that_is_closed_already_is_unavailable(peer: Peer) -> None:
    await peer.channel.close()
    call = rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=5)
    assert isinstance(await failure(call), errors.Unavailable)
    with pytest.raises(errors.Unavailable):
        async for _ in rpc.server_stream(peer.stub.TailLog, pb.TailLogRequest(), idle_timeout_s=5):
            pass


async def test_a_cancelled_caller_stays_cancelled(peer: Peer) -> None:
    call = asyncio.create_task(rpc.unary(peer.stub.Drain, pb.DrainRequest(), timeout_s=10))
    await rpc.unary(peer.stub.Check, pb.CheckRequest(), timeout_s=5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_stream_brings_everything_and_ends(peer: Peer) -> None:
    stream = rpc.server_stream(peer.stub.TailLog, pb.TailLogRequest(lines=500), idle_timeout_s=5)
    assert [response.line async for response in stream] == [str(number) for number in range(500)]


async def test_a_stream_error_is_typed_and_comes_after_what_was_sent(peer: Peer) -> None:
    peer.servicer.error = errors.RankFailed("rank 1 died")
    lines: list[str] = []
    with pytest.raises(errors.RankFailed):
        async for response in rpc.server_stream(
            peer.stub.TailLog, pb.TailLogRequest(lines=3), idle_timeout_s=5
        ):
            lines.append(response.line)
    assert lines == ["0", "1", "2"]


async def test_a_silent_stream_says_how_long_nothing_came(peer: Peer) -> None:
    request = pb.TailLogRequest(lines=2, follow=True)
    with pytest.raises(errors.DeadlineExceeded) as caught:
        async for _ in rpc.server_stream(peer.stub.TailLog, request, idle_timeout_s=0.2):
            pass
    assert str(caught.value) == (
        f"nothing came for 0.2 s (/{SERVICE}/TailLog): the stream is silent after 2 messages"
    )
    await asyncio.wait_for(peer.servicer.stream_ended.wait(), 5)


async def test_closing_a_stream_cancels_the_call(peer: Peer) -> None:
    request = pb.TailLogRequest(lines=1, follow=True)
    async with aclosing(rpc.server_stream(peer.stub.TailLog, request, idle_timeout_s=5)) as stream:
        await anext(stream)
        assert not peer.servicer.stream_ended.is_set()
    assert await asyncio.wait_for(peer.servicer.stream_ended.wait(), 5)


async def test_a_message_of_16_mib_passes(peer: Peer) -> None:
    request = pb.ProfileRequest(samples_per_second=16 * 1024 * 1024)
    answer = await rpc.unary(peer.stub.Profile, request, timeout_s=10)
    assert len(answer.collapsed_stacks) == request.samples_per_second


async def test_health_follows_its_owner(peer: Peer) -> None:
    states: asyncio.Queue[int] = asyncio.Queue()

    async def watch() -> None:
        async for answer in peer.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
            states.put_nowait(answer.status)

    watching = asyncio.create_task(watch())
    expected = [health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING]
    for turn, serves in enumerate((True, False, True)):
        assert await asyncio.wait_for(states.get(), 5) == expected[turn % 2]
        peer.server.set_serving(serves)
    watching.cancel()


async def test_health_lists_every_service_and_the_server_itself(peer: Peer) -> None:
    peer.server.set_serving(True)
    listed = await rpc.unary(peer.health.List, health_pb2.HealthListRequest(), timeout_s=5)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert {name: answer.status for name, answer in listed.statuses.items()} == {
        "": serving,
        SERVICE: serving,
    }


async def test_health_of_an_absurdly_named_service_is_not_found(peer: Peer) -> None:
    request = health_pb2.HealthCheckRequest(service="x" * 1_000_000)
    assert isinstance(await failure(rpc.unary(peer.health.Check, request, timeout_s=5)), errors.NotFound)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_and_their_contracts(peer: Peer, version: str) -> None:
    name = f"grpc.reflection.{version}.ServerReflection"
    ask = peer.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    wanted = [reflection_pb2.ServerReflectionRequest(list_services="")]
    wanted += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=one) for one in (SERVICE, name)]
    answers = [answer async for answer in ask(iter(wanted), timeout=5)]
    services = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, name, "grpc.health.v1.Health"} <= services
    files = [answer.file_descriptor_response.file_descriptor_proto for answer in answers[1:]]
    assert b"OperateService" in b"".join(files[0])
    assert b"ServerReflectionInfo" in b"".join(files[1])


async def test_a_busy_port_names_its_holder(peer: Peer) -> None:
    port = int(peer.address.rpartition(":")[2])
    caught = await failure(rpc.RpcServer(BindConfig(port=port), credential=ours()).start())
    assert isinstance(caught, errors.PortInUse)
    assert "python" in caught.why


async def test_a_foreign_port_is_reported_as_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        caught = await failure(
            rpc.RpcServer(BindConfig(port=taken.getsockname()[1]), credential=ours()).start()
        )
    assert isinstance(caught, errors.PortInUse)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_no_address_is_served_without_a_credential(host: str) -> None:
    caught = await failure(rpc.RpcServer(BindConfig(host=host)).start())
    assert isinstance(caught, errors.InvalidConfig)
    assert "bind.credential_file" in str(caught)


async def test_proxies_of_the_environment_are_ignored(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    channel = rpc.connect(peer.address, credential=ours())
    stub = operate_pb2_grpc.OperateServiceStub(channel)
    answer = await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5, attempts=1)
    assert isinstance(answer, pb.CheckResponse)
    await channel.close()


class Counting:
    """A service with a request stream, as the weight and environment services have them."""

    def __init__(self, answer: Callable[[int], bytes]) -> None:
        self._answer = answer

    async def count(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        total = 0
        async for _ in requests:
            total += 1
            answer = self._answer(total)
        return answer

    def add_to(self, servicer: Any, server: grpc.aio.Server) -> None:
        handler = grpc.stream_unary_rpc_method_handler(self.count, bytes, bytes)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Counting", {"Count": handler}),)
        )


@pytest.fixture
async def counting() -> AsyncIterator[Any]:
    def answer(total: int) -> bytes:
        if total == 99:
            raise errors.Exhausted("no more than 98")
        return str(total).encode()

    service = Counting(answer)
    server = rpc.RpcServer(BindConfig(), credential=ours())
    server.add(service.add_to, None, "test.Counting")
    async with rpc.connect(await server.start(), credential=ours()) as channel:
        yield channel.stream_unary("/test.Counting/Count")
    await server.stop(0)


async def numbers(count: int, broken: bool = False) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x"
    if broken:
        raise OSError("the file is gone")


async def test_a_client_stream_is_counted_whole(counting: Any) -> None:
    assert await rpc.client_stream(counting, numbers(50), timeout_s=5) == b"50"


async def test_an_early_refusal_of_a_client_stream_is_typed(counting: Any) -> None:
    assert isinstance(
        await failure(rpc.client_stream(counting, numbers(5000), timeout_s=5)), errors.Exhausted
    )


async def test_a_client_stream_raises_what_its_requests_raise(counting: Any) -> None:
    with pytest.raises(OSError, match="the file is gone"):
        await rpc.client_stream(counting, numbers(3, broken=True), timeout_s=5)


def test_importing_rpc_loads_nothing_heavy() -> None:
    heavy = ("aiohttp", "nats", "numpy", "pydantic", "torch", "vllm")
    code = f"import flotilla_core.rpc, sys; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


async def test_a_caller_that_is_refused_while_it_still_sends_hears_why() -> None:
    class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
        async def Train(self, requests: Any, context: Any) -> trainer_pb2.TrainResponse:
            await anext(aiter(requests))
            raise errors.StaleVersion("too late")

    async def requests(number: int) -> AsyncIterator[trainer_pb2.TrainRequest]:
        header = trainer_pb2.TrainHeader(run_id="run", update_id="run/0.0")
        yield trainer_pb2.TrainRequest(header=header)
        # Each call writes at another moment, some of them in the one in which the refusal arrives.
        await asyncio.sleep(number * 2e-5)
        for _ in range(4):
            yield trainer_pb2.TrainRequest(chunk=trainer_pb2.TrainChunk())

    async with serving(Trainer()) as address, rpc.connect(address, credential=ours()) as channel:
        train = trainer_pb2_grpc.TrainerServiceStub(channel).Train
        for number in range(200):
            with pytest.raises(errors.StaleVersion, match="too late"):
                await rpc.client_stream(train, requests(number), timeout_s=20)


def test_an_error_with_half_a_surrogate_pair_travels_as_what_it_is() -> None:
    text = "half a pair: \udcff"
    sent = errors.UserCodeError(text, where=text, why=text, next_step=text)
    status = rpc.status.encode(sent, traceback=text)
    got = rpc.status.from_status(status.SerializeToString())
    assert isinstance(got, errors.UserCodeError)
    assert (got.what, got.where, got.why, got.next_step) == ("half a pair: \\udcff",) * 4
