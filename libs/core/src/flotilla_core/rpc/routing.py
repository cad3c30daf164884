"""Which of several replicas gets the next work.

Invariants: least outstanding cost for its size, equals take turns; work of one affinity stays where it was as long as
that replica is among those that may take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from flotilla_core.rpc.replica import Replica

ReplicaT = TypeVar("ReplicaT", bound=Replica[Any])

AFFINITIES_KEPT = 65_536


class Routing:
    """Remembers whose turn it is, and where work of each affinity went last."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, str] = {}

    def choose(self, candidates: Sequence[ReplicaT], affinity: str = "") -> ReplicaT:
        """One of those that may take the work."""
        last = self._last.pop(affinity, "") if affinity else ""
        chosen = min(
            candidates, key=lambda one: (one.instance_id != last, one.outstanding / one.size, one.turn)
        )
        self._turn += 1
        chosen.turn = self._turn
        if affinity:
            self._last[affinity] = chosen.instance_id
            if len(self._last) > AFFINITIES_KEPT:
                del self._last[next(iter(self._last))]
        return chosen
