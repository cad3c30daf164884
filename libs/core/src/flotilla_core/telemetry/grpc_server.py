"""The server interceptor: one span a call, with the caller's context current inside the handler.

Invariants: every call runs in a task of its own (grpc.aio), so the context is set once and never reset, which
keeps streams free of detach errors; a span ends even when the peer cancels or vanishes.
Handlers are coroutines or asynchronous generators.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any

import grpc
from grpc.aio import ServerInterceptor
from opentelemetry import context as current_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from flotilla_core.telemetry import names
from flotilla_core.telemetry.carrier import TRACEPARENT, parse_traceparent, remote_context
from flotilla_core.telemetry.methods import STATUS_NAMES, attempt_of, note_attempt, span_name
from flotilla_core.telemetry.provider import tracer

_CODES = {code.value[0]: code for code in grpc.StatusCode}
# The server's own failures; other codes answer what the caller asked for.
_SERVER_ERRORS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


def server_interceptor() -> ServerInterceptor:
    """The interceptor for `grpc.aio.server`; it belongs first, so that it sees what the others answer."""
    return _TracingInterceptor()


class _TracingInterceptor(ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        name = span_name(handler_call_details.method)
        # grpc answers UNIMPLEMENTED for an unknown method, for which there is no handler.
        if name is None or handler is None or tracer() is None:
            return handler
        return _traced(handler, name, handler_call_details.invocation_metadata)


def _traced(handler: Any, name: str, metadata: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler of one call, inside a span."""
    if handler.request_streaming:
        behavior = handler.stream_stream if handler.response_streaming else handler.stream_unary
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )

    async def respond(request: Any, context: Any) -> Any:
        with _CallSpan(name, metadata, context):
            return await behavior(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        with _CallSpan(name, metadata, context):
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

    wrapped = stream if inspect.isasyncgenfunction(behavior) else respond
    return make(
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class _CallSpan:
    """The span around one call; it records how the call ended, cancellation included."""

    def __init__(self, name: str, metadata: Any, context: Any) -> None:
        self._span = _open(name, metadata)
        self._context = context

    def __enter__(self) -> None:
        """Nothing: the span is open already."""

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end(self._span, self._context, failure)


def _open(name: str, metadata: Any) -> Span:
    """A server span below the caller's, made current for the rest of this call's task."""
    active = tracer()
    if active is None:
        return trace.INVALID_SPAN
    parent = Context()
    for key, value in metadata:
        if key == TRACEPARENT:
            caller = parse_traceparent(value)
            parent = parent if caller is None else remote_context(caller)
            break
    span = active.start_span(
        name, parent, SpanKind.SERVER, {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: name}
    )
    note_attempt(span, attempt_of(metadata))
    current_context.attach(trace.set_span_in_context(span, parent))
    return span


def _end(span: Span, context: Any, failure: BaseException | None) -> None:
    code = _code(context, failure)
    span.set_attribute(names.RPC_STATUS_CODE, STATUS_NAMES[code])
    if code in _SERVER_ERRORS:
        span.set_attribute(names.ERROR_TYPE, STATUS_NAMES[code])
        span.set_status(StatusCode.ERROR)
    span.end()


def _code(context: Any, failure: BaseException | None) -> grpc.StatusCode:
    said = context.code()
    code = said if isinstance(said, grpc.StatusCode) else _CODES.get(said or 0, grpc.StatusCode.UNKNOWN)
    if failure is None or code is not grpc.StatusCode.OK:
        return code
    if isinstance(failure, asyncio.CancelledError | GeneratorExit):
        remaining_s = context.time_remaining()
        expired = remaining_s is not None and remaining_s <= 0
        return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
    return grpc.StatusCode.UNKNOWN
