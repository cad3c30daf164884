"""Whether a replica gets work from the runs, and which one a user means.

Invariant: one that speaks another protocol is ejected, and what a user drained is draining, whatever else is known of
it; else a replica stands as the run stands to it that gives it no work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.errors import NotFound
from flotilla_core.protocol import refusal
from flotilla_core.rpc import Replica
from flotilla_core.rpc.replica import ReplicaState

DRAINED = "drained by a user"

_WORKING = (reg.INSTANCE_STATE_READY, reg.INSTANCE_STATE_DRAINING)
_REPLICAS = (reg.SERVICE_KIND_GENERATOR, reg.SERVICE_KIND_REWARD)


@dataclass(frozen=True)
class Standing:
    """Whether a replica gets work, and how much it has."""

    state: ReplicaState
    why: str = ""
    outstanding: int = 0


def is_working_replica(registration: reg.Registration) -> bool:
    """Whether it is a generator or a reward replica that has started."""
    return registration.kind in _REPLICAS and registration.state in _WORKING


def standing(registration: reg.Registration, seen: Sequence[Replica[Any]], *, drained: bool) -> Standing:
    """How a replica stands that each of the runs sees in its own way; `drained` by a user."""
    if why := refusal(registration):
        return Standing("ejected", why)
    outstanding = sum(replica.outstanding for replica in seen)
    if drained:
        return Standing("draining", DRAINED, outstanding)
    if registration.state == reg.INSTANCE_STATE_DRAINING:
        return Standing("draining", "draining", outstanding)
    worst = next((replica for replica in seen if replica.state != "ready"), None)
    return Standing("ready" if worst is None else worst.state, worst.why if worst else "", outstanding)


def working_replica(registrations: Iterable[reg.Registration], reference: str) -> reg.Registration:
    """The replica with this instance id, or the newest in the slot of this name: another one there is dead."""
    working = [
        one for one in registrations if is_working_replica(one) and reference in (one.instance_id, one.name)
    ]
    if working:
        return max(working, key=lambda one: one.started_at.ToNanoseconds())
    raise NotFound(f"there is no replica {reference!r}", next_step="see `flotilla replicas list`")
