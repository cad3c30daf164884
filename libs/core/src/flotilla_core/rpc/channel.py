"""Channels between services.

Invariant: every channel of Flotilla is made here, so all have the same limits, keepalive, spans and token.
"""

from __future__ import annotations

import grpc

from flotilla_core.rpc.auth import token_metadata
from flotilla_core.rpc.options import CHANNEL_OPTIONS
from flotilla_core.telemetry.grpc import TracedChannel


def connect(address: str, *, token: str | None = None) -> grpc.aio.Channel:
    """A channel to `address` (host:port). It dials at the first call and again whenever the peer was away."""
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return TracedChannel(channel, token_metadata(token) if token else ())
