"""The client's side: a channel on which every call has one span, from its start until its status is known.

Invariants: a span ends exactly when the call has a status, cancellation included (grpc.aio never cancels a
stream that is merely dropped: whoever opens one cancels it); nothing is attached to the current context;
messages pass untouched, so `write()` and iterators both work. Interceptors of grpc.aio could do the same, but they
cost every call a task and every message of a stream another layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.trace import Span, SpanKind, StatusCode

from flotilla_core.telemetry import names
from flotilla_core.telemetry.carrier import TRACEPARENT, format_traceparent
from flotilla_core.telemetry.methods import STATUS_NAMES, attempt_of, note_attempt, span_name
from flotilla_core.telemetry.provider import tracer

Metadata = tuple[tuple[str, str], ...]


class TracedChannel(grpc.aio.Channel):
    """`channel` with a span around each call; what `metadata` gives for its method goes with it."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Callable[[str], Metadata] = lambda _: ()) -> None:
        self._channel = channel
        self._metadata = metadata

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._channel.__aexit__(kind, error, traceback)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    # What a stub asks for: the callable of one method, whose message types are the stub's affair.
    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        return _TracedMethod(method, self._channel.unary_unary(method, *codecs, **options), self._metadata)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Any:
        return _TracedMethod(method, self._channel.unary_stream(method, *codecs, **options), self._metadata)

    def stream_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        return _TracedMethod(method, self._channel.stream_unary(method, *codecs, **options), self._metadata)

    def stream_stream(self, method: str, *codecs: Any, **options: Any) -> Any:
        return _TracedMethod(method, self._channel.stream_stream(method, *codecs, **options), self._metadata)


class _TracedMethod:
    """One method of a stub: calling it starts a call and its span."""

    def __init__(self, method: str, start: Callable[..., Any], metadata: Callable[[str], Metadata]) -> None:
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
        call.add_done_callback(partial(_end, span))
        return call


def _end(span: Span, call: Any) -> None:
    code = _known_code(call)
    span.set_attribute(names.RPC_STATUS_CODE, STATUS_NAMES[code])
    if code is not grpc.StatusCode.OK:
        span.set_attribute(names.ERROR_TYPE, STATUS_NAMES[code])
        span.set_status(StatusCode.ERROR)
    span.end()


def _known_code(call: Any) -> grpc.StatusCode:
    """The status of a call that is done: `code()` then finishes without waiting, so one step runs it."""
    coroutine = call.code()
    try:
        coroutine.send(None)
    except StopIteration as finished:
        code: grpc.StatusCode = finished.value
        return code
    coroutine.close()
    return grpc.StatusCode.UNKNOWN
