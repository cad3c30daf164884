"""Logs of every process: one JSON object a line on stdout.

Invariants: each line has time, level, service and event; inside a span also its trace_id, and its run_id where
the span knows it. The standard library's loggers, ours and foreign ones, end in the same lines. Nobody but the
launcher writes log files.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict

# Chatty below warnings, and about things that our own lines tell better.
_QUIET = ("grpc", "nats", "asyncio", "urllib3", "httpx", "filelock")


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
