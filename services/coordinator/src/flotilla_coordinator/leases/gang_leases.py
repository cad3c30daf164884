"""Which gang belongs to which run, by the names of their slots.

Invariants: a gang has one run at a time, and a run one gang of each role; a gang that held a run before the coordinator
was started again is kept for that run until it has a gang.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


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
