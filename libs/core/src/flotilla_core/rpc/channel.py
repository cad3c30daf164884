"""Channels between services.

Invariants: every channel of Flotilla is made here, so all have the same limits, keepalive, spans, signatures and
fence; both ends agree on message and metadata limits; a port belongs to one process; a silent peer is noticed within
keepalive time plus timeout; proxies from the environment are never used between services.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import grpc

from flotilla_core.addresses import dialled
from flotilla_core.method_handlers import is_open_to_all
from flotilla_core.telemetry.grpc import TracedChannel
from flotilla_core.trust import HEADER, CallSigner, Token

if TYPE_CHECKING:
    from flotilla_core.config.stack import TlsConfig
    from flotilla_core.errors import FlotillaError
    from flotilla_core.rpc.fence import Fence

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
PART_BYTES = 2 << 20
"""The size of payload after which a stream of samples or groups begins its next message."""
# Errors travel as trailing metadata, and gRPC's own limit of 8 KiB would drop a traceback.
_METADATA_LIMIT_BYTES = 64 * 1024

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
]

CHANNEL_OPTIONS: _Options = [
    *_BOTH,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A new channel to a restarted replica must not inherit the back-off of the old one.
    ("grpc.use_local_subchannel_pool", 1),
]


def connect(
    address: str, *, token: str | Token | None = None, fence: Callable[[], Fence | None] | None = None
) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port). It dials at the first call and again whenever the peer was away.

    Each call is signed with `token`, the stack's secret or one with a role, which itself never travels; it also says
    whether to dial by TLS. `fence` says under which beginning of a run a call is made, call by call.
    """
    address = dialled(address)
    given_token = Token.of(token) if token else None
    tls = given_token.tls if given_token is not None and not address.startswith("unix:") else None
    signer = CallSigner(given_token, address) if given_token is not None else None

    def metadata(method: str) -> tuple[tuple[str, str], ...]:
        given = fence() if fence is not None else None
        fenced = given.metadata if given is not None else ()
        if signer is None or is_open_to_all(method):
            return fenced
        return ((HEADER, signer.sign(method)), *fenced)

    return TracedChannel(_dialled(address, tls), metadata, partial(_explained, address, tls))


def _dialled(address: str, tls: TlsConfig | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    # A command that calls on this host alone pays for none of it.
    from flotilla_core.rpc.tls import RenewedChannel
    from flotilla_core.trust.certificates import TlsFiles

    return RenewedChannel(
        TlsFiles(tls),
        lambda credentials: grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS),
    )


async def _explained(address: str, tls: TlsConfig | None, error: FlotillaError) -> FlotillaError:
    """Return `error`, or what is wrong with a certificate where that is its cause."""
    if address.startswith("unix:"):
        return error
    from flotilla_core.rpc.tls import explain

    return await explain(address, tls, error)
