"""The version of the contract between services.

Invariant: builds with the same major number understand each other; peers refuse any other one.
"""

from __future__ import annotations

from flotilla.common.v1.registration_pb2 import Registration
from flotilla_core.errors import Mismatch

PROTOCOL_VERSION = "1.0"


def check_protocol(peer: Registration) -> None:
    """Raise Mismatch when `peer` speaks another major version."""
    if peer.protocol_version.partition(".")[0] != PROTOCOL_VERSION.partition(".")[0]:
        raise Mismatch(
            f"{peer.instance_id} speaks protocol {peer.protocol_version or 'unknown'}",
            where=peer.address,
            why=f"this build speaks {PROTOCOL_VERSION}",
            next_step="Run the same release of Flotilla everywhere.",
        )


def refusal(peer: Registration) -> str:
    """Return which versions are refused, as a part of a longer message; empty if `peer` is accepted."""
    try:
        check_protocol(peer)
    except Mismatch as error:
        return f"{error.what}, {error.why}"
    return ""
