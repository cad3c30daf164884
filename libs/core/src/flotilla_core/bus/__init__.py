"""NATS: the embedded server, the connection, the registry of instances and the event stream of runs."""

from __future__ import annotations

from flotilla_core.bus.connection import Bus, Login
from flotilla_core.bus.events import Event, EventStream
from flotilla_core.bus.registry import Registry
from flotilla_core.bus.server import NatsServer

__all__ = ["Bus", "Event", "EventStream", "Login", "NatsServer", "Registry"]
