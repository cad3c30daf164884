"""Our interceptors on a real grpc.aio server: one client and one server span a call, always ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from flotilla_core import telemetry
from flotilla_core.telemetry import names
from flotilla_core.telemetry.grpc import ATTEMPT_METADATA, TracedChannel, TracingInterceptor

SERVICE = "flotilla.test.v1.TestService"
INNER = "inside the handler"


class Collector(TraceServiceServicer):
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self.spans += [
            span for rs in request.resource_spans for scope in rs.scope_spans for span in scope.spans
        ]
        return ExportTraceServiceResponse()


class Handlers(grpc.GenericRpcHandler):
    """One method a kind of call, and some that fail."""

    def __init__(self) -> None:
        self.stream_ended = asyncio.Event()
        self.hanging = asyncio.Event()
        self.hung_up = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rsplit("/", 1)[1]
        if method in ("UnaryUnary", "Abort", "Raise", "Hang", "Check"):
            return grpc.unary_unary_rpc_method_handler(getattr(self, f"_{method.lower()}"))
        if method in ("UnaryStream", "Endless"):
            return grpc.unary_stream_rpc_method_handler(getattr(self, f"_{method.lower()}"))
        if method == "Written":
            return grpc.unary_stream_rpc_method_handler(self._written)
        if method == "StreamUnary":
            return grpc.stream_unary_rpc_method_handler(self._streamunary)
        return grpc.stream_stream_rpc_method_handler(self._streamstream) if method == "StreamStream" else None

    async def _unaryunary(self, request: bytes, context: Any) -> bytes:
        with telemetry.span(INNER):
            return request

    _check = _unaryunary

    async def _unarystream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(3):
            with telemetry.span(INNER):
                pass
            yield request

    async def _written(self, request: bytes, context: Any) -> None:
        with telemetry.span(INNER):
            for _ in range(3):
                await context.write(request)

    async def _streamunary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        with telemetry.span(INNER):
            return b"".join([request async for request in requests])

    async def _streamstream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            with telemetry.span(INNER):
                pass
            yield request

    async def _endless(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield request
                await asyncio.sleep(0.005)
        finally:
            self.stream_ended.set()

    async def _abort(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
        return request

    async def _raise(self, request: bytes, context: Any) -> bytes:
        raise ValueError("broken")

    async def _hang(self, request: bytes, context: Any) -> bytes:
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.hung_up.set()
        return request


class Fixture:
    """A traced server and channel, and the collector of their spans."""

    def __init__(self, channel: grpc.aio.Channel, collector: Collector, handlers: Handlers) -> None:
        self.channel = channel
        self.collector = collector
        self.handlers = handlers

    async def spans(self, method: str) -> tuple[Span, Span]:
        """The client and the server span of the only call of a method."""
        await asyncio.to_thread(telemetry.stop)
        found = {s.kind: s for s in self.collector.spans if s.name == f"{SERVICE}/{method}"}
        assert len([s for s in self.collector.spans if s.name == f"{SERVICE}/{method}"]) == 2
        return found[Span.SPAN_KIND_CLIENT], found[Span.SPAN_KIND_SERVER]

    def unary(self, method: str, **options: Any) -> Any:
        return self.channel.unary_unary(f"/{SERVICE}/{method}")(b"x", **options)


@pytest_asyncio.fixture
async def traced(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Fixture]:
    caplog.set_level(logging.WARNING)
    collector, handlers = Collector(), Handlers()
    receiver = grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, receiver)
    receiver_port = receiver.add_insecure_port("127.0.0.1:0")
    await receiver.start()
    server = grpc.aio.server(interceptors=[TracingInterceptor()])
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    telemetry.start("test", "test-0", [f"127.0.0.1:{receiver_port}"])
    async with TracedChannel(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) as channel:
        yield Fixture(channel, collector, handlers)
    await server.stop(None)
    await asyncio.to_thread(telemetry.stop)
    await receiver.stop(None)
    assert "detach" not in caplog.text


def attribute(span: Span, key: str) -> str | None:
    return next((a.value.string_value for a in span.attributes if a.key == key), None)


async def _requests() -> AsyncIterator[bytes]:
    for part in (b"a", b"b"):
        yield part


async def _unary_unary(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"x") == b"x"


async def _unary_stream(channel: grpc.aio.Channel) -> None:
    assert [m async for m in channel.unary_stream(f"/{SERVICE}/UnaryStream")(b"x")] == [b"x"] * 3


async def _written(channel: grpc.aio.Channel) -> None:
    assert [m async for m in channel.unary_stream(f"/{SERVICE}/Written")(b"x")] == [b"x"] * 3


async def _stream_unary(channel: grpc.aio.Channel) -> None:
    assert await channel.stream_unary(f"/{SERVICE}/StreamUnary")(_requests()) == b"ab"


async def _stream_unary_by_write(channel: grpc.aio.Channel) -> None:
    call = channel.stream_unary(f"/{SERVICE}/StreamUnary")()
    await call.write(b"a")
    await call.write(b"b")
    await call.done_writing()
    assert await call == b"ab"


async def _stream_stream(channel: grpc.aio.Channel) -> None:
    assert [m async for m in channel.stream_stream(f"/{SERVICE}/StreamStream")(_requests())] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("UnaryUnary", _unary_unary),
        ("UnaryStream", _unary_stream),
        ("Written", _written),
        ("StreamUnary", _stream_unary),
        ("StreamUnary", _stream_unary_by_write),
        ("StreamStream", _stream_stream),
    ],
)
async def test_every_kind_of_call_is_one_chain_from_caller_to_handler(
    traced: Fixture, method: str, call: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    with telemetry.span("caller"):
        await call(traced.channel)
    client, server = await traced.spans(method)
    caller = next(s for s in traced.collector.spans if s.name == "caller")
    inner = [s for s in traced.collector.spans if s.name == INNER]
    assert client.parent_span_id == caller.span_id
    assert server.parent_span_id == client.span_id
    assert inner
    assert all(span.parent_span_id == server.span_id for span in inner)
    assert {s.trace_id for s in traced.collector.spans} == {caller.trace_id}
    for span in (client, server):
        assert attribute(span, names.RPC_SYSTEM_NAME) == "grpc"
        assert attribute(span, names.RPC_METHOD) == f"{SERVICE}/{method}"
        assert attribute(span, names.RPC_STATUS_CODE) == "OK"
        assert span.status.code == Status.STATUS_CODE_UNSET


async def test_a_cancelled_stream_ends_both_spans(traced: Fixture) -> None:
    call = traced.channel.unary_stream(f"/{SERVICE}/Endless")(b"x")
    assert await anext(aiter(call)) == b"x"
    call.cancel()
    async with asyncio.timeout(5):
        await traced.handlers.stream_ended.wait()
    client, server = await traced.spans("Endless")
    assert attribute(client, names.RPC_STATUS_CODE) == "CANCELLED"
    assert attribute(server, names.RPC_STATUS_CODE) == "CANCELLED"


async def test_a_refusal_is_the_callers_error_alone(traced: Fixture) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.unary("Abort")
    client, server = await traced.spans("Abort")
    assert attribute(client, names.ERROR_TYPE) == "FAILED_PRECONDITION"
    assert client.status.code == Status.STATUS_CODE_ERROR
    assert attribute(server, names.RPC_STATUS_CODE) == "FAILED_PRECONDITION"
    assert server.status.code == Status.STATUS_CODE_UNSET


async def test_a_crash_in_the_handler_is_an_error_on_both_sides(traced: Fixture) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.unary("Raise")
    client, server = await traced.spans("Raise")
    assert attribute(client, names.ERROR_TYPE) == attribute(server, names.ERROR_TYPE) == "UNKNOWN"
    assert server.status.code == Status.STATUS_CODE_ERROR


async def test_a_deadline_ends_both_spans(traced: Fixture) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.unary("Hang", timeout=0.2)
    await traced.channel.unary_unary(f"/{SERVICE}/Check")(b"x")  # the server has seen the end of the first
    client, server = await traced.spans("Hang")
    assert attribute(client, names.RPC_STATUS_CODE) == "DEADLINE_EXCEEDED"
    assert attribute(server, names.RPC_STATUS_CODE) in ("DEADLINE_EXCEEDED", "CANCELLED")


async def test_a_cancelled_unary_call_ends_both_spans(traced: Fixture) -> None:
    call = asyncio.ensure_future(_await(traced.unary("Hang")))
    await asyncio.wait_for(traced.handlers.hanging.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(traced.handlers.hung_up.wait(), 10)
    client, server = await traced.spans("Hang")
    assert attribute(client, names.RPC_STATUS_CODE) == "CANCELLED"
    assert attribute(server, names.RPC_STATUS_CODE) == "CANCELLED"


async def _await(call: Any) -> Any:
    return await call


async def test_a_later_attempt_is_an_event_on_both_spans(traced: Fixture) -> None:
    await traced.unary("UnaryUnary", metadata=((ATTEMPT_METADATA, "3"),))
    for span in await traced.spans("UnaryUnary"):
        assert [(event.name, event.attributes[0].value.int_value) for event in span.events] == [
            (names.RETRY_EVENT, 3)
        ]


@pytest.mark.parametrize("attempt", ["x", "", "-5", "9" * 5000, "1e3"])
async def test_an_attempt_that_is_no_number_ends_no_call(traced: Fixture, attempt: str) -> None:
    await traced.unary("UnaryUnary", metadata=((ATTEMPT_METADATA, attempt),))
    assert [len(span.events) for span in await traced.spans("UnaryUnary")] == [0, 0]


async def test_health_checks_leave_no_span(traced: Fixture) -> None:
    await traced.channel.unary_unary("/grpc.health.v1.Health/Check")(b"x")
    await asyncio.to_thread(telemetry.stop)
    assert [span.name for span in traced.collector.spans] == [INNER]


async def test_calls_work_untraced_after_telemetry_has_stopped(traced: Fixture) -> None:
    await asyncio.to_thread(telemetry.stop)
    for call in (_unary_unary, _unary_stream, _stream_unary_by_write, _stream_stream):
        await call(traced.channel)
    assert traced.collector.spans == []
