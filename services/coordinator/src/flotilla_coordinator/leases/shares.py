"""How many generators each run has, and which.

Invariants: a function of its arguments alone; every run has one before any has two, shares are even, nobody has more
than it wants, and of all such deals this one takes the fewest generators from runs that hold them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A run that generates."""

    run_id: str
    most: int | None = None
    """Generators that it wants at most."""


def shares(slots: Sequence[str], claims: Sequence[Claim], held: Mapping[str, str]) -> dict[str, str]:
    """The run of each slot, by who holds them now; nobody's is left out. Earlier claims come first."""
    rooms = _counts(len(slots), claims, Counter(held[slot] for slot in slots if slot in held))
    dealt: dict[str, str] = {}
    for slot in slots:
        holder = held.get(slot, "")
        if rooms.get(holder, 0) > 0:
            dealt[slot] = holder
            rooms[holder] -= 1
    for slot in slots:
        taker = next((run_id for run_id, room in rooms.items() if room > 0), None)
        if slot not in dealt and taker is not None:
            dealt[slot] = taker
            rooms[taker] -= 1
    return dealt


def _counts(slots: int, claims: Sequence[Claim], held: Mapping[str, int]) -> dict[str, int]:
    """How many each run has: one after the other to whoever has least, of equals to whoever holds most already."""
    counts = {claim.run_id: 0 for claim in claims}
    for _ in range(slots):
        wanting = [
            claim.run_id for claim in claims if claim.most is None or counts[claim.run_id] < claim.most
        ]
        if not wanting:
            break
        least = min(counts[run_id] for run_id in wanting)
        level = [run_id for run_id in wanting if counts[run_id] == least]
        counts[max(level, key=lambda run_id: held.get(run_id, 0))] += 1
    return counts
