"""NATS: the embedded server, the connection, the registry of instances and the event stream of runs."""

from __future__ import annotations

from flotilla_core.optional_imports import left_out

# nats-py takes aiohttp for servers behind a WebSocket, which ours is not: every process would start 0.1 s later.
with left_out("aiohttp"):
    from flotilla_core.bus.connection import Bus, Login
    from flotilla_core.bus.events import EventStream
    from flotilla_core.bus.registry import Registry
    from flotilla_core.bus.server import NatsServer

__all__ = ["Bus", "EventStream", "Login", "NatsServer", "Registry"]
