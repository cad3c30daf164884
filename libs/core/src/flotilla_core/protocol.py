"""The version of the contract between services, and the one rule by which builds of two releases work together.

Invariants: a build understands its own major number and the two beside it, because the newer of two neighbours keeps
for one release what the older one calls; peers refuse any other number by name. None before `OLDEST` is understood.
`NEW_IN` says what each major number brought, so what a neighbour cannot do is named where it is listed. Minor numbers
say nothing about this.
"""

from __future__ import annotations

from flotilla.common.v1.registration_pb2 import Registration
from flotilla_core.errors import Mismatch

PROTOCOL_VERSION = "4.0"
OLDEST = 3
"""The first major number whose builds show a certificate at each connection; the others cannot be called at all."""

NEW_IN: dict[int, tuple[str, ...]] = {4: ("take the turns of many episodes over one call",)}
"""The things that services of each major number can do and those of the number before cannot."""


def major_of(version: str) -> int | None:
    """Return the major number of a version; None where the text is no version."""
    number = version.partition(".")[0]
    return int(number) if number.isdecimal() and len(number) <= 9 else None


def check_protocol(peer: Registration) -> None:
    """Raise Mismatch when the major number of `peer` is no neighbour of ours."""
    own, theirs = major_of(PROTOCOL_VERSION), major_of(peer.protocol_version)
    assert own is not None
    oldest = max(own - 1, OLDEST)
    if theirs is None or not oldest <= theirs <= own + 1:
        raise Mismatch(
            f"{peer.instance_id} speaks protocol {peer.protocol_version or 'unknown'}",
            where=peer.address,
            why=f"this build speaks {PROTOCOL_VERSION}, and understands the numbers {oldest} to {own + 1}",
            next_step="Run the same release of Flotilla everywhere, or two that follow each other.",
        )


def refusal(peer: Registration) -> str:
    """Return which versions are refused, as a part of a longer message; empty if `peer` is accepted."""
    try:
        check_protocol(peer)
    except Mismatch as error:
        return f"{error.what}, {error.why}"
    return ""


def limits(peer: Registration) -> str:
    """Return what an accepted peer of an older major number cannot do; empty where it can do all that we can."""
    own, theirs = major_of(PROTOCOL_VERSION), major_of(peer.protocol_version)
    if own is None or theirs is None or theirs >= own:
        return ""
    missing = [one for number in range(theirs + 1, own + 1) for one in NEW_IN.get(number, ())]
    return f"speaks protocol {peer.protocol_version}, so it cannot {', or '.join(missing)}" if missing else ""
