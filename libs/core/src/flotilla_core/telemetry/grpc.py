"""Spans of calls: a channel for clients and an interceptor for servers, with one span a call on each side.

Invariants: a client's span is open from the start of the call and ends exactly when the call has a status,
cancellation included (grpc.aio never cancels a stream that is merely dropped: its opener cancels it); a
server's span ends even when the peer cancels or vanishes. On the client's side nothing is attached to the current
context; on the server's side the caller's context is current inside the handler: every call runs in a task of its own
(grpc.aio), so the context is set once and never reset, which keeps streams free of detach errors.

Messages pass the channel untouched, so `write()` and iterators both work. Interceptors of grpc.aio could do the same
on the client's side, but they cost every call a task and every message of a stream another layer. Handlers are
coroutines or asynchronous generators.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
from grpc.aio import ServerInterceptor
from opentelemetry import context as current_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from flotilla_core.method_handlers import behavior_of, wrapped
from flotilla_core.telemetry import names
from flotilla_core.telemetry.provider import tracer
from flotilla_core.telemetry.spans import TRACEPARENT, format_traceparent, parse_traceparent, remote_context

Metadata = tuple[tuple[str, str], ...]

STATUS_NAMES = {code: code.name for code in grpc.StatusCode}

ATTEMPT_METADATA = "flotilla-attempt"
"""The key under which our own retries send the number of their try, from the second on."""
_FEW = re.compile(r"[0-9]{1,6}")
_TRANSPARENT_RETRIES = "grpc-previous-rpc-attempts"

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


@functools.lru_cache(maxsize=1024)
def span_name(method: str | bytes) -> str | None:
    """`package.Service/Method` of a full method name, or None where the method is not traced."""
    full = method.decode() if isinstance(method, bytes) else method
    if full in names.UNTRACED_METHODS or full.startswith(names.UNTRACED_PREFIXES):
        return None
    return full.removeprefix("/")


def attempt_of(metadata: Iterable[tuple[str, Any]]) -> int:
    """Return the number of this attempt at its call, from 1 on, over our own retries and those of the channel.

    A span must not end a call: what is no number, or none of so few retries, counts for nothing.
    """
    attempt = 1
    for key, value in metadata:
        if key not in (ATTEMPT_METADATA, _TRANSPARENT_RETRIES) or not _FEW.fullmatch(str(value)):
            continue
        attempt += int(value) - (key == ATTEMPT_METADATA)
    return max(attempt, 1)


def note_attempt(span: Span, attempt: int) -> None:
    """Add an event to the span of a call that is not the first attempt."""
    if attempt > 1:
        span.add_event(names.RETRY_EVENT, {names.ATTEMPT: attempt})


class TracedChannel(grpc.aio.Channel):
    """`channel` with a span around each call; what `metadata` gives for its method goes with it."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: Callable[[str], Metadata] = lambda _: (),
        explain: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> None:
        """`explain` returns a better error for one about the connection; `rpc.calls` asks it."""
        self._channel = channel
        self._metadata = metadata
        self._explain = explain

    def _traced(self, kind: str, method: str, codecs: Any, options: Any) -> _TracedMethod:
        start = self._starting(kind, method, *codecs, **options)
        return _TracedMethod(method, start, self._metadata, self._explain)

    def _starting(self, kind: str, *given: Any, **options: Any) -> Callable[..., Any]:
        """Return what starts a call of one method."""
        start: Callable[..., Any] = getattr(self._channel, kind)(*given, **options)
        return start

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    # Stubs call this for the callable of one method; they know its message types.
    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._traced("unary_unary", method, codecs, options)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._traced("unary_stream", method, codecs, options)

    def stream_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._traced("stream_unary", method, codecs, options)

    def stream_stream(self, method: str, *codecs: Any, **options: Any) -> Any:
        return self._traced("stream_stream", method, codecs, options)


class _TracedMethod:
    """One method of a stub: calling it starts a call and its span."""

    def __init__(
        self,
        method: str,
        start: Callable[..., Any],
        metadata: Callable[[str], Metadata],
        explain: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> None:
        self.explain = explain
        # Under the name that gRPC's own callables have it.
        self._method = method
        self._span_name = span_name(method)
        self._start = start
        self._metadata = metadata

    def __call__(self, request: Any = None, *, metadata: Metadata | None = None, **options: Any) -> Any:
        sent = (*(metadata or ()), *self._metadata(self._method))
        active, name = tracer(), self._span_name
        if active is None or name is None:
            return self._start(request, metadata=sent, **options)
        span = active.start_span(
            name, kind=SpanKind.CLIENT, attributes={names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: name}
        )
        note_attempt(span, attempt_of(sent))
        traceparent = (TRACEPARENT, format_traceparent(span.get_span_context()))
        with ExitStack() as unless_begun:
            # A call that never began has no one else to end its span.
            unless_begun.callback(span.end)
            call = self._start(request, metadata=(*sent, traceparent), **options)
            unless_begun.pop_all()
        call.add_done_callback(partial(_end_of_call, span))
        return call


def _end_of_call(span: Span, call: Any) -> None:
    code = _known_code(call)
    span.set_attribute(names.RPC_STATUS_CODE, STATUS_NAMES[code])
    if code is not grpc.StatusCode.OK:
        span.set_attribute(names.ERROR_TYPE, STATUS_NAMES[code])
        span.set_status(StatusCode.ERROR)
    span.end()


def _known_code(call: Any) -> grpc.StatusCode:
    """Return the status of a call that is done: `code()` then finishes without waiting, so one step runs it."""
    coroutine = call.code()
    try:
        coroutine.send(None)
    except StopIteration as finished:
        code: grpc.StatusCode = finished.value
        return code
    coroutine.close()
    return grpc.StatusCode.UNKNOWN


class TracingInterceptor(ServerInterceptor):
    """The interceptor for `grpc.aio.server`; it belongs before those whose answers it shall see."""

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
    """Return the same handler of one call, inside a span."""
    behavior = behavior_of(handler)

    async def respond(request: Any, context: Any) -> Any:
        with _CallSpan(name, metadata, context):
            return await behavior(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        with _CallSpan(name, metadata, context):
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

    # A handler in coroutine style writes its stream through the context.
    respond_stream: Any = stream if inspect.isasyncgenfunction(behavior) else respond
    return wrapped(handler, respond, respond_stream)


class _CallSpan:
    """The span around one call; it records how the call ended, cancellation included."""

    def __init__(self, name: str, metadata: Any, context: Any) -> None:
        self._span = _open(name, metadata)
        self._context = context

    def __enter__(self) -> None:
        """Do nothing: the span is open already."""

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end_of_handling(self._span, self._context, failure)


def _open(name: str, metadata: Any) -> Span:
    """Open a server span below the caller's, current for the rest of this call's task."""
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


def _end_of_handling(span: Span, context: Any, failure: BaseException | None) -> None:
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
