"""The OTLP door of the coordinator: spans of every process go straight into the store."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from flotilla_coordinator.timeline.store import SpanStore

SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"
add_to_server = add_TraceServiceServicer_to_server


class TraceReceiver(TraceServiceServicer):
    """Answers once the spans are committed; says how many a full queue refused."""

    def __init__(self, store: SpanStore) -> None:
        self._store = store

    async def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        refused = await self._store.add(request)
        if not refused:
            return ExportTraceServiceResponse()
        return ExportTraceServiceResponse(
            partial_success=ExportTracePartialSuccess(
                rejected_spans=refused, error_message="the span store cannot keep up"
            )
        )
