"""The door to spans of calls: `TracedChannel` for clients, `server_interceptor()` for servers."""

from __future__ import annotations

from flotilla_core.telemetry.grpc_client import TracedChannel
from flotilla_core.telemetry.grpc_server import server_interceptor
from flotilla_core.telemetry.methods import ATTEMPT_METADATA

__all__ = ["ATTEMPT_METADATA", "TracedChannel", "server_interceptor"]
