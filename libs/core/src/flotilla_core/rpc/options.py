"""Options of every channel and server.

Invariants: both ends agree on message and metadata limits; a port belongs to one process; a silent peer is
noticed within keepalive time plus timeout; proxies from the environment are never used between services.
"""

from __future__ import annotations

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
PART_BYTES = 2 << 20
"""After how much payload a stream of samples or groups begins its next message."""
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
