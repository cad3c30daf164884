"""The one door to gRPC: every server, channel and call of Flotilla goes through here.

Invariant: a name is loaded when it is first asked for, so that a command which only calls never pays for what serves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla_core.rpc.calls import client_stream, duplex, server_stream, unary
    from flotilla_core.rpc.channel import connect
    from flotilla_core.rpc.fence import Fence
    from flotilla_core.rpc.patience import UNLIMITED_S, Patience
    from flotilla_core.rpc.pool import ReplicaPool
    from flotilla_core.rpc.replica_set import Load, Replica
    from flotilla_core.rpc.server import RpcServer

_MODULES = {
    "Fence": "fence",
    "Load": "replica_set",
    "Patience": "patience",
    "Replica": "replica_set",
    "ReplicaPool": "pool",
    "RpcServer": "server",
    "UNLIMITED_S": "patience",
    "client_stream": "calls",
    "connect": "channel",
    "duplex": "calls",
    "server_stream": "calls",
    "unary": "calls",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
