"""Sends ended spans to one OTLP endpoint from a thread of its own.

Invariants: ending a span never waits. The queue is bounded, and what falls out of it is counted. An endpoint that is
away costs one warning an outage, and `shutdown` returns within its limit whatever the endpoint does. A batch that
could not be sent is kept and sent again, so a restart of the receiver loses nothing that still fits the queue. Ids
come from the operating system, so that seeding `random` for a run never repeats a trace.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from flotilla_core.telemetry import names
from flotilla_core.trust.roles import SERVER_NAME

if TYPE_CHECKING:
    from flotilla_core.trust import Credential, Pem

QUEUE_SPANS = 16_384
BATCH_SPANS = 256
SCHEDULE_DELAY_S = 0.5
EXPORT_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 2.0
_LONGEST_PAUSE_S = 5.0

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", 64 << 20),
)
# The receiver refuses the batch itself: sending it again cannot help.
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)

_ENCRYPTED = "https://"

logger = logging.getLogger(__name__)

_MAX_LINKS = 1024
_MAX_ATTRIBUTE_LENGTH = 4096


class OtlpProcessor(SpanProcessor):
    """The export of every span of this process to one endpoint."""

    def __init__(self, endpoint: str, credential: Credential | None = None) -> None:
        """An `endpoint` at https://host:port belongs to the stack, and is shown `credential`."""
        self.endpoint = endpoint
        self.dropped = 0
        self._queue: deque[ReadableSpan] = deque()
        self._pending = threading.Event()
        self._stopping = threading.Event()
        self._deadline = float("inf")
        self._away = False
        self._credential = credential if endpoint.startswith(_ENCRYPTED) else None
        self._shown: Pem | None = None
        self._dial()
        self._thread = threading.Thread(target=self._run, name=f"otlp-{endpoint}", daemon=True)
        self._thread.start()

    def _dial(self) -> None:
        address = self.endpoint.rpartition("/")[2]
        if self._credential is None:
            self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            pem = self._shown = self._credential.current()
            options = (*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME))
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=options)
        self._stub = TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None or not context.trace_flags.sampled:
            return
        if len(self._queue) >= QUEUE_SPANS:
            self.dropped += 1
            return
        self._queue.append(span)
        if not self._pending.is_set():
            self._pending.set()

    def shutdown(self) -> None:
        """Send what is queued, for `SHUTDOWN_TIMEOUT_S` at most."""
        if self._stopping.is_set():
            return
        self._deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        self._stopping.set()
        self._pending.set()
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self._channel.close()
        lost = len(self._queue) + self.dropped
        if lost:
            logger.warning("%d spans were not delivered to %s", lost, self.endpoint)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until the queue is empty."""
        deadline = time.monotonic() + timeout_millis / 1000
        while self._queue and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._queue

    def _run(self) -> None:
        pause_s = SCHEDULE_DELAY_S
        while True:
            self._pending.wait()
            self._stopping.wait(pause_s)
            self._pending.clear()
            delivered = self._send_queue()
            if self._stopping.is_set() and (not self._queue or time.monotonic() >= self._deadline):
                return
            pause_s = SCHEDULE_DELAY_S if delivered else min(pause_s * 2, _LONGEST_PAUSE_S)
            if self._stopping.is_set():
                time.sleep(0.05)
            if self._queue:
                self._pending.set()

    def _send_queue(self) -> bool:
        """Send batch after batch; a batch leaves the queue only once it is delivered or refused for good."""
        if self._credential is not None and self._credential.current() is not self._shown:
            self._channel.close()
            self._dial()
        while self._queue:
            count = min(len(self._queue), BATCH_SPANS)
            timeout_s = min(EXPORT_TIMEOUT_S, self._deadline - time.monotonic())
            if timeout_s <= 0:
                return False
            # Only this thread takes from the left end, so the first `count` spans stay where they are.
            request = encode_spans([self._queue[index] for index in range(count)])
            try:
                answer = self._stub.Export(request, timeout=timeout_s)
            except grpc.RpcError as error:
                if error.code() not in _REFUSED:
                    self._went_away(error)
                    return False
                self.dropped += count
                self._went_away(error)
            else:
                self.dropped += answer.partial_success.rejected_spans
                self._came_back()
            for _ in range(count):
                self._queue.popleft()
        return True

    def _went_away(self, error: grpc.RpcError) -> None:
        if not self._away:
            self._away = True
            logger.warning("spans cannot be sent to %s now: %s", self.endpoint, error.details())

    def _came_back(self) -> None:
        if self._away:
            self._away = False
            logger.info("spans reach %s again; dropped so far: %d", self.endpoint, self.dropped)


def tracer_provider(service: str, instance_id: str) -> TracerProvider:
    """Return a provider that samples everything and sends nothing yet."""
    resource = Resource.create(
        {
            names.SERVICE_NAME: service,
            names.SERVICE_INSTANCE_ID: instance_id,
            names.HOST_NAME: platform.node(),
            names.PROCESS_PID: os.getpid(),
        }
    )
    return TracerProvider(
        sampler=ParentBased(ALWAYS_ON),
        resource=resource,
        shutdown_on_exit=False,
        id_generator=_SystemIds(),
        span_limits=SpanLimits(max_links=_MAX_LINKS, max_attribute_length=_MAX_ATTRIBUTE_LENGTH),
    )


class _SystemIds(IdGenerator):
    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8)) or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16)) or 1

    def is_trace_id_random(self) -> bool:
        return True
