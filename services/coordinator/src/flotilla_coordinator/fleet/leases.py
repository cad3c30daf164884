"""Records which gang and which generator belong to which run, by the names of their slots.

Invariants: a slot belongs to one run at a time, also while its process is started again. A run has one gang of each
role. A gang that a run held before the coordinator was started again is kept for that run until the run has a gang. A
generator that moves between runs is given to the next one only after the first has released it.

A generator's slot counts once its process is ready. A leased slot continues to count while its process is started
again, for as long as a start may take. Where the run has no other generator, it counts for a part of that time. A
slot whose generator leaves in order, or was drained by a user, no longer counts. A generator whose build cannot talk
to ours counts like one that is away. Generators of judges never count: all runs ask them.

Shares of the generators depend on the arguments alone: every run gets one before any run gets two, shares are even, and
no run gets more than it wants. Of all such assignments, the one that takes the fewest generators from their runs is
chosen.

The file is only a preference: if it is missing or out of date, runs continue with other services, and load from their
checkpoints what these do not hold. Only the coordinator that owns the state writes it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.files import write_atomically
from flotilla_core.logger import get_logger
from flotilla_core.protocol import refusal
from flotilla_core.roles import holds_judge

ALONE = 1 / 3
"""The part of the grace period that the only generator of a run gets, because the run is idle meanwhile."""

log = get_logger(__name__)

GANGS, GENERATORS = "gangs", "generators"
Holders = Mapping[str, Mapping[str, str]]
"""Runs by slots, by the kind of slot."""


class GangLeases:
    """Leases gangs of every role to runs."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, str]] = {}
        """Run and role, by slot."""
        self._remembered: dict[str, str] = {}
        self._roles: dict[str, tuple[str, ...]] = {}

    @property
    def held(self) -> Mapping[str, str]:
        """Return the run of each slot that has one."""
        return {slot: run_id for slot, (run_id, _) in self._held.items()}

    def claim(self, run_id: str, roles: tuple[str, ...], remembered: Collection[str]) -> None:
        """Register a run that needs a gang of each of these roles; the slots in `remembered` worked for it before."""
        self._roles[run_id] = roles
        self._remembered |= dict.fromkeys(remembered, run_id)

    def roles(self, run_id: str) -> tuple[str, ...]:
        """Return the roles in which a run needs a gang."""
        return self._roles.get(run_id, ())

    def of_role(self, role: str) -> dict[str, str]:
        """Return the run of each slot of a role that has one."""
        return {slot: run_id for slot, (run_id, held_role) in self._held.items() if held_role == role}

    def claimants(self, role: str) -> list[str]:
        """Return the runs that need a gang of a role."""
        return [run_id for run_id, roles in self._roles.items() if role in roles]

    def slot(self, run_id: str, role: str) -> str | None:
        """Return the slot of the gang that a run has in a role."""
        return next((slot for slot, holder in self._held.items() if holder == (run_id, role)), None)

    def open_to(self, run_id: str, role: str, slots: Collection[str]) -> set[str]:
        """Return the slots of a role that a run may have: its own, else the one it had before, else the free ones."""
        own = self.slot(run_id, role)
        if own is not None:
            return {own} & set(slots)
        free = {slot for slot in slots if slot not in self._held}
        mine = {slot for slot in free if self._remembered.get(slot) == run_id}
        return mine or {slot for slot in free if not self._is_kept(slot, role)}

    def take(self, run_id: str, role: str, slot: str) -> bool:
        """Lease a slot; return False where another run was faster."""
        taken = self._held.setdefault(slot, (run_id, role)) == (run_id, role)
        if taken:  # Should it be lost later, any free one will do.
            self._remembered.pop(slot, None)
        return taken

    def give_back(self, run_id: str, role: str) -> None:
        """Release the run's gang of a role, so that it can look for another one, or for the same one again."""
        slot = self.slot(run_id, role)
        if slot is not None:
            del self._held[slot]

    def end(self, run_id: str) -> None:
        """Release everything that a run has, and forget it."""
        for role in self._roles.pop(run_id, ()):
            self.give_back(run_id, role)
        self._remembered = {slot: kept for slot, kept in self._remembered.items() if kept != run_id}

    def _is_kept(self, slot: str, role: str) -> bool:
        """Return whether the slot is kept for a run that had it and has no gang of this role yet."""
        run_id = self._remembered.get(slot)
        return run_id is not None and self.slot(run_id, role) is None


class GeneratorLeases:
    """Leases generators to the runs that claim them, by the names of their slots."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._held: dict[str, str] = {}
        self._leaving: set[str] = set()

    @property
    def claimants(self) -> list[str]:
        """Return the runs that want generators."""
        return list(self._claims)

    @property
    def held(self) -> Mapping[str, str]:
        """Return the run of each slot that has one."""
        return self._held

    @property
    def leaving(self) -> list[str]:
        """Return the slots that their runs are to release."""
        return sorted(self._leaving)

    def claim(self, claim: Claim, remembered: Iterable[str] = ()) -> None:
        """Register a run that wants generators; it gets back those in `remembered` that no other run has."""
        self._claims[claim.run_id] = claim
        for slot in remembered:
            self._held.setdefault(slot, claim.run_id)

    def end(self, run_id: str) -> None:
        """Forget a run that uses no generator any more."""
        self._claims.pop(run_id, None)
        for slot in [slot for slot, holder in self._held.items() if holder == run_id]:
            self.let_go(slot)

    def let_go(self, slot: str) -> None:
        """Take a slot back; nothing of its run is left on it."""
        self._held.pop(slot, None)
        self._leaving.discard(slot)

    def deal(self, slots: Iterable[str]) -> list[str]:
        """Assign these slots, which are all that exist, and return the slots that their runs must now release."""
        slots = sorted(slots, key=_natural)
        staying = {slot: run_id for slot, run_id in self._held.items() if slot not in self._leaving}
        dealt = allocate(slots, list(self._claims.values()), staying)
        for slot in slots:
            if slot in dealt and slot not in self._held:
                self._held[slot] = dealt[slot]
        new = [slot for slot, run_id in staying.items() if dealt.get(slot) != run_id]
        self._leaving.update(new)
        return new


def _natural(slot: str) -> tuple[str, int, str]:
    """Sort `generator-10` after `generator-9`."""
    kind, _, number = slot.rpartition("-")
    return (kind, int(number), slot) if number.isdecimal() else (slot, 0, slot)


class GeneratorSlots:
    """Finds the slots of generators that can be assigned, and remembers since when a leased slot's process is away."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._away: dict[str, float] = {}

    @property
    def any_away(self) -> bool:
        """Return whether the slots may change by the passing of time alone."""
        return bool(self._away)

    def available(
        self, snapshot: Mapping[str, reg.Registration], leased: Mapping[str, str], drained: Collection[str]
    ) -> set[str]:
        """Return the slots; `leased` gives the run of a slot, `drained` has instance ids."""
        ready: set[str] = set()
        leaving: set[str] = set()
        for one in snapshot.values():
            if one.kind != reg.SERVICE_KIND_GENERATOR or holds_judge(one.name):
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


@dataclass(frozen=True)
class Claim:
    """A run that wants generators."""

    run_id: str
    most: int | None = None
    """The most generators that it wants; None sets no limit."""


def allocate(slots: Sequence[str], claims: Sequence[Claim], held: Mapping[str, str]) -> dict[str, str]:
    """Return the run of each slot, given the present holders and the claims, earlier ones first."""
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
    """Count the slots of each run, given out one by one to the run with the fewest, of equals to the largest holder."""
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


class LeaseFile:
    """The file that says for the next coordinator which run has which service, written at every change."""

    def __init__(self, path: Path, may_write: Callable[[], bool]) -> None:
        self._path = path
        self._may_write = may_write
        self._before = self._read()
        self._written: Holders | None = None

    def had(self, kind: str, run_id: str) -> list[str]:
        """Return the slots that a run had under the previous coordinator."""
        return [slot for slot, holder in self._before.get(kind, {}).items() if holder == run_id]

    def write(self, holders: Holders) -> None:
        """Write the present holders, where they changed."""
        if holders == self._written or not self._may_write():
            return
        self._written = {kind: dict(slots) for kind, slots in holders.items()}
        try:
            write_atomically(self._path, json.dumps(self._written, indent=2) + "\n")
        except OSError as error:  # a full disk costs the next coordinator a checkpoint at worst
            log.warning("the leases of services were not written", error=str(error))

    def _read(self) -> Holders:
        try:
            content = json.loads(self._path.read_text("utf-8"))
            return {kind: dict(content[kind]) for kind in (GANGS, GENERATORS)}
        except (OSError, ValueError, TypeError, KeyError):
            return {}
