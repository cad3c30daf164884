"""NATS: the embedded server, the connection, the registry of instances and the event stream of runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _left_out(module: str) -> Iterator[None]:
    """Let the imports inside find that an optional `module` is not installed, unless it is loaded already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # Python's own mark of what cannot be imported
    try:
        yield
    finally:
        del sys.modules[module]


# nats-py takes aiohttp for servers behind a WebSocket, which ours is not: every process would start 0.1 s later.
with _left_out("aiohttp"):
    from flotilla_core.bus.connection import Bus, Login
    from flotilla_core.bus.events import Event, EventStream
    from flotilla_core.bus.registry import Registry
    from flotilla_core.bus.server import NatsServer

__all__ = ["Bus", "Event", "EventStream", "Login", "NatsServer", "Registry"]
