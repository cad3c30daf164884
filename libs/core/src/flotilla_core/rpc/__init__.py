"""The one door to gRPC: every server, channel and call of Flotilla goes through here."""

from __future__ import annotations

from flotilla_core.rpc.auth import is_loopback, read_token
from flotilla_core.rpc.calls import client_stream, server_stream, unary
from flotilla_core.rpc.channel import connect
from flotilla_core.rpc.pool import ReplicaPool
from flotilla_core.rpc.replica import Replica
from flotilla_core.rpc.server import RpcServer

__all__ = [
    "Replica",
    "ReplicaPool",
    "RpcServer",
    "client_stream",
    "connect",
    "is_loopback",
    "read_token",
    "server_stream",
    "unary",
]
