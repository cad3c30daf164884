"""Channels between services.

Invariant: every channel of Flotilla is made here, so all have the same limits, keepalive, spans, token and fence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from flotilla_core.rpc.auth import token_metadata
from flotilla_core.rpc.options import CHANNEL_OPTIONS
from flotilla_core.telemetry.grpc import TracedChannel

if TYPE_CHECKING:
    from flotilla_core.rpc.fence import Fence


def connect(
    address: str, *, token: str | None = None, fence: Callable[[], Fence | None] | None = None
) -> grpc.aio.Channel:
    """A channel to `address` (host:port). It dials at the first call and again whenever the peer was away.

    `fence` says under which beginning of a run a call is made, call by call.
    """
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    fixed = token_metadata(token) if token else ()

    def metadata() -> tuple[tuple[str, str], ...]:
        given = fence() if fence is not None else None
        return fixed if given is None else (*fixed, *given.metadata)

    return TracedChannel(channel, metadata)
