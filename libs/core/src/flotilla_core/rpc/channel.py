"""Channels between services.

Invariant: every channel of Flotilla is made here, so all have the same limits, keepalive, spans, signatures and fence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from flotilla_core.rpc.handlers import is_open_to_all
from flotilla_core.rpc.options import CHANNEL_OPTIONS
from flotilla_core.telemetry.grpc import TracedChannel
from flotilla_core.trust import HEADER, CallSigner, dialled

if TYPE_CHECKING:
    from flotilla_core.rpc.fence import Fence


def connect(
    address: str, *, token: str | None = None, fence: Callable[[], Fence | None] | None = None
) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port). It dials at the first call and again whenever the peer was away.

    Each call is signed with `token`, the stack's secret, which itself never travels. `fence` says under which beginning
    of a run a call is made, call by call.
    """
    address = dialled(address)
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    signer = CallSigner(token, address) if token else None

    def metadata(method: str) -> tuple[tuple[str, str], ...]:
        given = fence() if fence is not None else None
        fenced = given.metadata if given is not None else ()
        if signer is None or is_open_to_all(method):
            return fenced
        return ((HEADER, signer.sign(method)), *fenced)

    return TracedChannel(channel, metadata)
