"""Which generators there are to deal, by the names of their slots.

Invariants: a slot counts once its process is ready; one that a run has counts on while its process is started again,
for as long as a start may take, and for a part of that where the run has no other one; one that leaves in order, or
that a user drained, counts no more; one whose build cannot talk to ours counts as little as one that is away.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.protocol import refusal

ALONE = 1 / 3
"""Of the patience, for the only slot of a run, which cannot do anything meanwhile."""


class GeneratorSlots:
    """Remembers since when the process of a leased slot is away."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._away: dict[str, float] = {}

    @property
    def any_away(self) -> bool:
        """Whether time alone may change what there is."""
        return bool(self._away)

    def there(
        self, snapshot: Mapping[str, reg.Registration], leased: Mapping[str, str], drained: Collection[str]
    ) -> set[str]:
        """The slots; `leased` says which run has one, `drained` are instances."""
        ready: set[str] = set()
        leaving: set[str] = set()
        for one in snapshot.values():
            if one.kind != reg.SERVICE_KIND_GENERATOR:
                continue
            if one.state == reg.INSTANCE_STATE_DRAINING or one.instance_id in drained:
                leaving.add(one.name)
            elif one.state == reg.INSTANCE_STATE_READY and not refusal(one):
                ready.add(one.name)
        now = time.monotonic()
        self._away = {slot: self._away.get(slot, now) for slot in leased if slot not in ready | leaving}
        served = {leased[slot] for slot in ready if slot in leased}
        return ready | {
            slot
            for slot, since in self._away.items()
            if now - since < (self._patience_s if leased[slot] in served else self._patience_s * ALONE)
        }
