"""Channels between services.

Invariants: every channel of Flotilla is made here, so all have the same limits, keepalive, spans, credential and fence;
both ends agree on message and metadata limits; a port belongs to one process; a silent peer is noticed within keepalive
time plus timeout; proxies from the environment are never used between services. A channel of TCP is encrypted, and its
peer is a service of the stack, whatever its address is. A socket file needs neither: its folder decides who connects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import grpc

from flotilla_core.addresses import UNIX
from flotilla_core.errors import InvalidConfig
from flotilla_core.rpc.tls import RenewedChannel, explain
from flotilla_core.telemetry.grpc import TracedChannel
from flotilla_core.trust.roles import SERVER_NAME

if TYPE_CHECKING:
    from flotilla_core.rpc.fence import Fence
    from flotilla_core.trust import Credential

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
PART_BYTES = 2 << 20
"""The size of payload after which a stream of samples or groups begins its next message."""
# Errors travel as trailing metadata, and gRPC's own limit of 8 KiB would drop a traceback.
_METADATA_LIMIT_BYTES = 64 * 1024

DIAL_S = 5.0
"""The time in which a peer has to shake hands. Where processors are busy it takes a second, and no call may fail for
that. A peer that is not there refuses at once."""

_Options = list[tuple[str, str | int]]

_BOTH: _Options = [
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_metadata_size", _METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", _METADATA_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: _Options = [
    *_BOTH,
    # With the default a second server on the same port binds silently and takes half of the traffic.
    ("grpc.so_reuseport", 0),
    # Long silent calls are normal here: clients may ping every 10 s without being sent away.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # A credential that was replaced must not live on in an old connection; calls that run end on theirs.
    ("grpc.max_connection_age_ms", 600_000),
    # All episodes of a step begin at once; by default new calls are refused where a thousand wait to be accepted.
    ("grpc.server.max_pending_requests", 65_536),
    ("grpc.server.max_pending_requests_hard_limit", 65_536),
]

CHANNEL_OPTIONS: _Options = [
    *_BOTH,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A new channel to a restarted replica must not inherit the back-off of the old one.
    ("grpc.use_local_subchannel_pool", 1),
]


def connect(
    address: str,
    *,
    credential: Credential | None = None,
    fence: Callable[[], Fence | None] | None = None,
    dial_s: float = DIAL_S,
) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port). It dials at the first call and again whenever the peer was away.

    It shows `credential`, which only a socket file does without. `fence` says under which beginning of a run a call is
    made, call by call. A peer that takes longer than `dial_s` to answer the first time is called away.
    """

    def metadata(_: str) -> tuple[tuple[str, str], ...]:
        given = fence() if fence is not None else None
        return given.metadata if given is not None else ()

    if address.startswith(UNIX):
        return TracedChannel(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS), metadata)
    if credential is None:
        raise InvalidConfig(
            "the call has no credential",
            where=address,
            why="services take no call without a certificate",
            next_step="start the stack (flotilla up), or name a credential: --credential-file FILE",
        )
    options: _Options = [
        *CHANNEL_OPTIONS,
        ("grpc.min_reconnect_backoff_ms", int(dial_s * 1000)),
        ("grpc.ssl_target_name_override", SERVER_NAME),
    ]
    return RenewedChannel(
        credential,
        lambda pem: grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=options),
        metadata,
        partial(explain, address, credential),
    )
