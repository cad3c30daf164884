"""The timeline: spans of every process arrive by OTLP, stay in SQLite and leave as a Chrome trace."""

from __future__ import annotations

from flotilla_coordinator.timeline.chrome import chrome_trace
from flotilla_coordinator.timeline.reader import SpanReader
from flotilla_coordinator.timeline.store import SpanStore, TraceReceiver

__all__ = ["SpanReader", "SpanStore", "TraceReceiver", "chrome_trace"]
