"""The tracer of this process: started once, stopped once, silent in between.

Invariants: before `start`, after `stop` and without endpoints every span is a no-op; the process-wide OpenTelemetry
provider stays untouched, because libraries inside a service may own it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from flotilla_core.errors import FailedPrecondition

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

    from flotilla_core.telemetry.export import OtlpProcessor
    from flotilla_core.trust import Credential


class _State:
    provider: TracerProvider | None = None
    processors: tuple[OtlpProcessor, ...] = ()
    tracer: Tracer | None = None


def start(
    service: str, instance_id: str, otlp: Sequence[str], *, credential: Credential | None = None
) -> None:
    """Record spans and send them to every endpoint of `otlp`; where there is none, record nothing.

    `credential` is shown to those at https://host:port; one at host:port is sent to in the open.
    """
    if not otlp:
        return
    if _State.provider is not None:
        raise FailedPrecondition("telemetry is already started in this process", where=f"start({service!r})")
    # A command line calls without ever recording: the SDK is for those that do.
    from flotilla_core.telemetry.export import OtlpProcessor, tracer_provider

    provider = tracer_provider(service, instance_id)
    _State.processors = tuple(OtlpProcessor(endpoint, credential) for endpoint in otlp)
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
            list(pool.map(lambda processor: processor.shutdown(), processors))


def endpoints() -> tuple[str, ...]:
    """Return the endpoints of this process's spans, so that its children can export to them too."""
    return tuple(processor.endpoint for processor in _State.processors)


def dropped_spans() -> int:
    """Return the number of this process's spans that fell out of a full queue or were refused."""
    return sum(processor.dropped for processor in _State.processors)


def tracer() -> Tracer | None:
    """Return the tracer while telemetry is on."""
    return _State.tracer
