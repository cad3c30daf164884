"""How the OpenTelemetry SDK is set up in a process that records.

Invariant: ids come from the operating system, so that seeding `random` for a run never repeats a trace.
"""

from __future__ import annotations

import os
import platform

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from flotilla_core.telemetry import names

_MAX_LINKS = 1024
_MAX_ATTRIBUTE_LENGTH = 4096


def tracer_provider(service: str, instance_id: str) -> TracerProvider:
    """A provider that samples everything and sends nothing yet."""
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
