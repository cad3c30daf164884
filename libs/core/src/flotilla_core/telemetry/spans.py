"""Spans around the work, and span contexts as text.

The text is W3C trace context: in gRPC metadata, in NATS headers and in commands to ranks.

Rule of the timeline: parent while the caller waits, link where work crosses a queue or a step. `span` makes its span
current and must not stay open across a generator's `yield`; `start_span` makes nothing current, is for spans that
outlive a block, and its caller ends the span in a `finally`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from types import TracebackType

from opentelemetry import context as current_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.util.types import AttributeValue

from flotilla_core.telemetry import names
from flotilla_core.telemetry.provider import tracer

Attributes = Mapping[str, AttributeValue]
Origin = Context | Span | SpanContext

ROOT = Context()
"""The `parent` that starts a new trace, instead of a child of the current span."""

TRACEPARENT = "traceparent"
_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def start_span(
    name: str,
    *,
    attributes: Attributes | None = None,
    links: Iterable[Origin] = (),
    parent: Origin | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """Return a started span that is not current; the caller ends it. Its parent is the current span unless given."""
    active = tracer()
    if active is None:
        return trace.INVALID_SPAN
    origins = [_span_context(origin) for origin in links]
    return active.start_span(
        name,
        None if parent is None else _as_context(parent),
        kind,
        attributes,
        [Link(origin) for origin in origins if origin.is_valid] or None,
    )


class span:
    """Context manager: a span that is current in its block and carries the block's failure."""

    def __init__(
        self,
        name: str,
        *,
        attributes: Attributes | None = None,
        links: Iterable[Origin] = (),
        parent: Origin | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        self._span = start_span(name, attributes=attributes, links=links, parent=parent, kind=kind)

    def __enter__(self) -> Span:
        self._token = current_context.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        current_context.detach(self._token)
        if error is not None:
            fail(self._span, error)
        self._span.end()


def fail(failed: Span, error: BaseException) -> None:
    """Mark a span as failed by `error`; it still has to be ended."""
    cancelled = isinstance(error, asyncio.CancelledError)
    failed.set_attribute(names.ERROR_TYPE, "cancelled" if cancelled else type(error).__name__)
    failed.set_status(Status(StatusCode.ERROR, "cancelled" if cancelled else str(error)))


def _as_context(origin: Origin) -> Context:
    if isinstance(origin, Context):
        return origin
    owner = origin if isinstance(origin, Span) else trace.NonRecordingSpan(origin)
    return trace.set_span_in_context(owner, Context())


def _span_context(origin: Origin) -> SpanContext:
    if isinstance(origin, SpanContext):
        return origin
    if isinstance(origin, Span):
        return origin.get_span_context()
    return trace.get_current_span(origin).get_span_context()


def format_traceparent(context: SpanContext) -> str:
    """Return the header for a valid span context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def parse_traceparent(header: str) -> SpanContext | None:
    """Return the span context in a header, or None for a malformed header."""
    match = _PATTERN.fullmatch(header)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    context = SpanContext(int(match[2], 16), int(match[3], 16), True, TraceFlags(int(match[4], 16)))
    return context if context.is_valid else None


def current_carrier() -> dict[str, str]:
    """Return the current span as headers; empty outside any span."""
    context = trace.get_current_span().get_span_context()
    return {TRACEPARENT: format_traceparent(context)} if context.is_valid else {}


def from_carrier(carrier: Mapping[str, str]) -> Context:
    """Return the context in a carrier; without one an empty context: a new trace."""
    parent = parse_traceparent(carrier.get(TRACEPARENT, ""))
    return Context() if parent is None else remote_context(parent)


def remote_context(parent: SpanContext) -> Context:
    """Return a context whose current span is `parent`, which lives in another process."""
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())
