"""Logs of every process: one JSON object a line on stdout.

Invariants: each line has time, level, service and event; inside a span also its trace_id, and its run_id where
the span knows it. The standard library's loggers, ours and foreign ones, end in the same lines. Only the
launcher writes log files. A line that cannot be written, because the disk of the log is full, is lost: it ends neither
the call that logs nor the process.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from flotilla_core.logger import EventDict, structlog

# They are chatty below warnings, and our own lines report the same things better.
_QUIET = ("grpc", "nats", "asyncio", "urllib3", "httpx", "httpx2", "httpcore2", "filelock")


def configure_logs(service: str, *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library; `service` is the name in every line."""
    out = stream or sys.stdout

    def add_service(_: Any, __: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.add_log_level,
        add_service,
        _add_trace,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(default=str)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def name_instance(instance_id: str) -> None:
    """Put the id of the instance into every line of this context, and of the tasks that begin in it."""
    structlog.contextvars.bind_contextvars(instance_id=instance_id)


class LossyStream:
    """A text stream whose writes never fail: what the disk does not take is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` if possible; return its length in any case."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line, as `write` does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the buffer, as far as the disk takes it."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the stream."""
        return getattr(self._stream, name)


def tolerate_lost_lines() -> None:
    """Let this process outlive a log that cannot be written."""
    sys.stdout, sys.stderr = cast(TextIO, LossyStream(sys.stdout)), cast(TextIO, LossyStream(sys.stderr))


def _add_trace(_: Any, __: str, event: EventDict) -> EventDict:
    from opentelemetry import trace

    from flotilla_core.telemetry import names

    span = trace.get_current_span()
    context = span.get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        run_id = (getattr(span, "attributes", None) or {}).get(names.RUN_ID)
        if run_id:
            event.setdefault("run_id", run_id)
    return event
