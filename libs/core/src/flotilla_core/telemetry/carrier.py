"""Span contexts as text: W3C trace context in gRPC metadata, NATS headers and the environment of children."""

from __future__ import annotations

import re
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

TRACEPARENT = "traceparent"
_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def format_traceparent(context: SpanContext) -> str:
    """The header for a valid span context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def parse_traceparent(header: str) -> SpanContext | None:
    """The span context in a header, or None where the header is malformed."""
    match = _PATTERN.fullmatch(header)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    context = SpanContext(int(match[2], 16), int(match[3], 16), True, TraceFlags(int(match[4], 16)))
    return context if context.is_valid else None


def current_carrier() -> dict[str, str]:
    """The current span as headers; empty outside any span."""
    context = trace.get_current_span().get_span_context()
    return {TRACEPARENT: format_traceparent(context)} if context.is_valid else {}


def current_environment() -> dict[str, str]:
    """The current span as environment variables of a child process; empty outside any span."""
    return {key.upper(): value for key, value in current_carrier().items()}


def from_carrier(carrier: Mapping[str, str]) -> Context:
    """The context in a carrier (or in `os.environ`); without one an empty context: a new trace."""
    header = carrier.get(TRACEPARENT) or carrier.get(TRACEPARENT.upper()) or ""
    parent = parse_traceparent(header)
    return Context() if parent is None else remote_context(parent)


def remote_context(parent: SpanContext) -> Context:
    """A context whose current span is `parent`, which lives in another process."""
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())
