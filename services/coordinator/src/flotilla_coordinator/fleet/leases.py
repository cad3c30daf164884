"""Which gang and which generator belong to which run, by the names of their slots.

Invariants: a slot has one run at a time, and keeps it while its process is started again; a run has one gang of each
role, and a gang that held a run before the coordinator was started again is kept for that run until it has a gang; a
generator that is to change hands goes to the next run only when the run that has it has let it go.

A generator's slot counts once its process is ready; one that a run has counts on while its process is started again,
for as long as a start may take, and for a part of that where the run has no other one; one that leaves in order, or
that a user drained, counts no more; one whose build cannot talk to ours counts as little as one that is away.

Shares of the generators are a function of their arguments alone: every run has one before any has two, shares are
even, nobody has more than it wants, and of all such deals the one is taken that moves the fewest generators away from
runs that hold them.

The file is a wish and no more: without it, or with one that is out of date, runs go on with other services, and load
from their checkpoints what these do not hold. Only the coordinator that works writes it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.files import write_atomically
from flotilla_core.protocol import refusal

ALONE = 1 / 3
"""Of the patience, for the only slot of a run, which cannot do anything meanwhile."""

log = structlog.get_logger(__name__)

GANGS, GENERATORS = "gangs", "generators"
Holders = Mapping[str, Mapping[str, str]]
"""Runs by slots, by what the slots are of."""


class GangLeases:
    """Gangs of every role."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, str]] = {}
        """Run and role, by slot."""
        self._remembered: dict[str, str] = {}
        self._roles: dict[str, tuple[str, ...]] = {}

    @property
    def held(self) -> Mapping[str, str]:
        """The run of each slot that has one."""
        return {slot: run_id for slot, (run_id, _) in self._held.items()}

    def claim(self, run_id: str, roles: tuple[str, ...], remembered: Collection[str]) -> None:
        """A run needs a gang of each of these roles; `remembered` worked for it before."""
        self._roles[run_id] = roles
        self._remembered |= dict.fromkeys(remembered, run_id)

    def roles(self, run_id: str) -> tuple[str, ...]:
        """Those that a run needs a gang of."""
        return self._roles.get(run_id, ())

    def of_role(self, role: str) -> dict[str, str]:
        """The run of each slot of a role that has one."""
        return {slot: run_id for slot, (run_id, held_role) in self._held.items() if held_role == role}

    def claimants(self, role: str) -> list[str]:
        """The runs that need a gang of a role."""
        return [run_id for run_id, roles in self._roles.items() if role in roles]

    def slot(self, run_id: str, role: str) -> str | None:
        """The gang that a run has in a role."""
        return next((slot for slot, holder in self._held.items() if holder == (run_id, role)), None)

    def open_to(self, run_id: str, role: str, slots: Collection[str]) -> set[str]:
        """Those of a role's slots that a run may have: its own, else the one that it had, else what nobody has."""
        own = self.slot(run_id, role)
        if own is not None:
            return {own} & set(slots)
        free = {slot for slot in slots if slot not in self._held}
        mine = {slot for slot in free if self._remembered.get(slot) == run_id}
        return mine or {slot for slot in free if not self._is_kept(slot, role)}

    def take(self, run_id: str, role: str, slot: str) -> bool:
        """Lease one; False where somebody else was faster."""
        taken = self._held.setdefault(slot, (run_id, role)) == (run_id, role)
        if taken:  # Should it be lost later, any free one will do.
            self._remembered.pop(slot, None)
        return taken

    def give_back(self, run_id: str, role: str) -> None:
        """The run looks for another gang, or for the same again."""
        slot = self.slot(run_id, role)
        if slot is not None:
            del self._held[slot]

    def end(self, run_id: str) -> None:
        """The run needs none any more."""
        for role in self._roles.pop(run_id, ()):
            self.give_back(run_id, role)
        self._remembered = {slot: kept for slot, kept in self._remembered.items() if kept != run_id}

    def _is_kept(self, slot: str, role: str) -> bool:
        """Whether a run that has no gang of this role yet had this one."""
        run_id = self._remembered.get(slot)
        return run_id is not None and self.slot(run_id, role) is None


class GeneratorLeases:
    """Which generator belongs to which run, by the names of their slots.

    Deals generators to the runs that claim them.
    """

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
        dealt = allocate(slots, list(self._claims.values()), staying)
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


class GeneratorSlots:
    """Which generators there are to deal, by the names of their slots.

    Remembers since when the process of a leased slot is away.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._away: dict[str, float] = {}

    @property
    def any_away(self) -> bool:
        """Whether time alone may change what there is."""
        return bool(self._away)

    def available(
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


@dataclass(frozen=True)
class Claim:
    """A run that generates."""

    run_id: str
    most: int | None = None
    """Generators that it wants at most."""


def allocate(slots: Sequence[str], claims: Sequence[Claim], held: Mapping[str, str]) -> dict[str, str]:
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


class LeaseFile:
    """Who has which service, for a coordinator that comes after this one.

    Written at every change.
    """

    def __init__(self, path: Path, may_write: Callable[[], bool]) -> None:
        self._path = path
        self._may_write = may_write
        self._before = self._read()
        self._written: Holders | None = None

    def had(self, kind: str, run_id: str) -> list[str]:
        """The slots that a run had under the coordinator before."""
        return [slot for slot, holder in self._before.get(kind, {}).items() if holder == run_id]

    def write(self, holders: Holders) -> None:
        """What is so now."""
        if holders == self._written or not self._may_write():
            return
        self._written = {kind: dict(slots) for kind, slots in holders.items()}
        try:
            write_atomically(self._path, json.dumps(self._written, indent=2) + "\n")
        except OSError as error:  # a full disk costs the next coordinator a checkpoint at worst
            log.warning("who has which service was not written", error=str(error))

    def _read(self) -> Holders:
        try:
            content = json.loads(self._path.read_text("utf-8"))
            return {kind: dict(content[kind]) for kind in (GANGS, GENERATORS)}
        except (OSError, ValueError, TypeError, KeyError):
            return {}
