"""Which generator belongs to which run, by the names of their slots.

Invariants: a slot has one run at a time, and keeps it while its process is started again; one that is to change hands
goes to the next run only when the run that has it has let it go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flotilla_coordinator.leases.shares import Claim, shares


class GeneratorLeases:
    """Deals generators to the runs that claim them."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._held: dict[str, str] = {}
        self._leaving: set[str] = set()

    @property
    def claimants(self) -> list[str]:
        """The runs that want generators."""
        return list(self._claims)

    @property
    def held(self) -> Mapping[str, str]:
        """The run of each slot that has one."""
        return self._held

    @property
    def leaving(self) -> list[str]:
        """Slots that their runs are to let go."""
        return sorted(self._leaving)

    def claim(self, claim: Claim, remembered: Iterable[str] = ()) -> None:
        """A run wants generators; it has those again that it had before, where nobody else has them."""
        self._claims[claim.run_id] = claim
        for slot in remembered:
            self._held.setdefault(slot, claim.run_id)

    def end(self, run_id: str) -> None:
        """A run wants none any more, and uses none."""
        self._claims.pop(run_id, None)
        for slot in [slot for slot, holder in self._held.items() if holder == run_id]:
            self.let_go(slot)

    def let_go(self, slot: str) -> None:
        """Nothing of a run is left on a slot of its."""
        self._held.pop(slot, None)
        self._leaving.discard(slot)

    def deal(self, slots: Iterable[str]) -> list[str]:
        """Deal these, which are all that there are; the slots that their runs are to let go from now on."""
        slots = sorted(slots, key=_natural)
        staying = {slot: run_id for slot, run_id in self._held.items() if slot not in self._leaving}
        dealt = shares(slots, list(self._claims.values()), staying)
        for slot in slots:
            if slot in dealt and slot not in self._held:
                self._held[slot] = dealt[slot]
        new = [slot for slot, run_id in staying.items() if dealt.get(slot) != run_id]
        self._leaving.update(new)
        return new


def _natural(slot: str) -> tuple[str, int, str]:
    """`generator-10` comes after `generator-9`."""
    kind, _, number = slot.rpartition("-")
    return (kind, int(number), slot) if number.isdecimal() else (slot, 0, slot)
