"""OpenTelemetry spans of every process: `start` once, `span` around the work, `stop` at the end."""

from __future__ import annotations

from flotilla_core.telemetry import names
from flotilla_core.telemetry.provider import dropped_spans, endpoints, start, stop
from flotilla_core.telemetry.spans import ROOT, current_carrier, fail, from_carrier, span, start_span
