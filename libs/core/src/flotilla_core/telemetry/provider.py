"""The tracer of this process: started once, stopped once, silent in between.

Invariants: before `start`, after `stop` and without endpoints every span is a no-op; ids come from the
operating system, so that seeding `random` for a run never repeats a trace; the process-wide OpenTelemetry
provider stays untouched, because libraries inside a service may own it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Tracer

from flotilla_core.errors import FailedPrecondition
from flotilla_core.telemetry import names
from flotilla_core.telemetry.export import OtlpProcessor

_MAX_LINKS = 1024
_MAX_ATTRIBUTE_LENGTH = 4096


class _SystemIds(IdGenerator):
    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8)) or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16)) or 1

    def is_trace_id_random(self) -> bool:
        return True


class _State:
    provider: TracerProvider | None = None
    processors: tuple[OtlpProcessor, ...] = ()
    tracer: Tracer | None = None


def start(service: str, instance_id: str, otlp: Sequence[str]) -> None:
    """Record spans and send them to every `host:port` of `otlp`; where there is none, record nothing."""
    if _State.provider is not None:
        raise FailedPrecondition("telemetry is already started in this process", where=f"start({service!r})")
    if not otlp:
        return
    resource = Resource.create(
        {
            names.SERVICE_NAME: service,
            names.SERVICE_INSTANCE_ID: instance_id,
            names.HOST_NAME: platform.node(),
            names.PROCESS_PID: os.getpid(),
        }
    )
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON),
        resource=resource,
        shutdown_on_exit=False,
        id_generator=_SystemIds(),
        span_limits=SpanLimits(max_links=_MAX_LINKS, max_attribute_length=_MAX_ATTRIBUTE_LENGTH),
    )
    _State.processors = tuple(OtlpProcessor(endpoint) for endpoint in otlp)
    for processor in _State.processors:
        provider.add_span_processor(processor)
    _State.provider = provider
    _State.tracer = provider.get_tracer("flotilla")


def stop() -> None:
    """Send what is queued and end, within 2 s whatever the endpoints do. Blocks: call it off the loop."""
    processors, _State.processors = _State.processors, ()
    _State.provider = _State.tracer = None
    if processors:
        with ThreadPoolExecutor(len(processors)) as pool:
            list(pool.map(OtlpProcessor.shutdown, processors))


def endpoints() -> tuple[str, ...]:
    """Where spans of this process go, so that its children can send theirs there too."""
    return tuple(processor.endpoint for processor in _State.processors)


def dropped_spans() -> int:
    """Spans of this process that fell out of a full queue or that an endpoint refused."""
    return sum(processor.dropped for processor in _State.processors)


def tracer() -> Tracer | None:
    """The tracer while telemetry is on."""
    return _State.tracer
