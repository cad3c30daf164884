"""Turns OTLP messages into rows of the span store."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from flotilla_core.telemetry import names

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]


class ResourceKey(NamedTuple):
    """The process that a span comes from."""

    service: str
    instance: str
    host: str
    pid: int


class SpanRow(NamedTuple):
    """A span as it is stored, without its resource."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: str
    links: bytes | None
    """Trace and span id of each linked span, 24 bytes a link."""
    run_id: str | None
    step: int | None


def count_spans(request: ExportTraceServiceRequest) -> int:
    """Return the number of spans in a request."""
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def rows(request: ExportTraceServiceRequest) -> Iterator[tuple[ResourceKey, SpanRow]]:
    """Return every span of a request with its process; spans without valid ids are left out."""
    for resource_spans in request.resource_spans:
        key = _resource_key(resource_spans.resource.attributes)
        for scope in resource_spans.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) == 16 and len(span.span_id) == 8:
                    yield key, _row(span)


def _resource_key(attributes: Iterable[KeyValue]) -> ResourceKey:
    found = {attribute.key: _plain(attribute.value) for attribute in attributes}
    pid = found.get(names.PROCESS_PID)
    service = str(found.get(names.SERVICE_NAME) or "unknown")
    return ResourceKey(
        service,
        str(found.get(names.SERVICE_INSTANCE_ID) or service),
        str(found.get(names.HOST_NAME) or ""),
        pid if isinstance(pid, int) else 0,
    )


def _row(span: OtlpSpan) -> SpanRow:
    attributes = {attribute.key: _plain(attribute.value) for attribute in span.attributes}
    run_id = attributes.get(names.RUN_ID)
    step = attributes.get(names.STEP)
    if span.events:
        attributes["events"] = [_event(event) for event in span.events]
    if span.status.message:
        attributes["status.message"] = span.status.message
    return SpanRow(
        span.trace_id,
        span.span_id,
        span.parent_span_id or None,
        span.name,
        span.kind,
        span.start_time_unix_nano,
        max(span.start_time_unix_nano, span.end_time_unix_nano),
        span.status.code,
        json.dumps(attributes, separators=(",", ":"), sort_keys=True) if attributes else "{}",
        b"".join(link.trace_id + link.span_id for link in span.links) or None,
        run_id if isinstance(run_id, str) else None,
        step if isinstance(step, int) else None,
    )


def _event(event: OtlpSpan.Event) -> Value:
    return {
        "name": event.name,
        "time_ns": event.time_unix_nano,
        **{attribute.key: _plain(attribute.value) for attribute in event.attributes},
    }


def _plain(value: AnyValue) -> Value:
    """Convert to a JSON value; a value that JSON cannot hold becomes text."""
    kind = value.WhichOneof("value")
    if kind in ("string_value", "int_value", "bool_value"):
        plain: Value = getattr(value, kind)
        return plain
    if kind == "double_value":
        return value.double_value if math.isfinite(value.double_value) else str(value.double_value)
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: _plain(item.value) for item in value.kvlist_value.values}
    return value.bytes_value.hex() if kind == "bytes_value" else None
