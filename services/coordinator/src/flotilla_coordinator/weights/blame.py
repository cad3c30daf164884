"""Whose fault it is that a weight group broke.

Invariants: a member that reports a failure of its own is to blame; somebody else's failure, and a limit that all
members missed, blame nobody; what every single member refuses alike would be refused in any other epoch too.
"""

from __future__ import annotations

from flotilla_coordinator.weights.members import Group, Member
from flotilla_core.errors import (
    DeadlineExceeded,
    FlotillaError,
    Mismatch,
    StaleVersion,
    WeightGroupFailed,
    WeightsMismatch,
)

Failures = dict[str, FlotillaError]
"""What went wrong, by the name of the member or `trainer`."""

# What a healthy member reports when another one failed, or when the epoch ended under it.
NOT_ITS_FAULT = (WeightGroupFailed, StaleVersion)


class GroupBrokenError(Exception):
    """The group of this epoch is lost; `failures` says what each member reported."""

    def __init__(self, failures: Failures, group: Group | None = None) -> None:
        super().__init__("; ".join(f"{name}: {error}" for name, error in failures.items()))
        self.failures = failures
        self.group = group

    @property
    def common_mismatch(self) -> WeightsMismatch | Mismatch | None:
        """The mismatch that every single member reports: another epoch would not change it."""
        members = self.group.members if self.group is not None else ()
        reported = [self.failures.get(member.name) for member in members]
        mismatches = [error for error in reported if isinstance(error, WeightsMismatch | Mismatch)]
        return mismatches[0] if mismatches and len(mismatches) == len(members) else None


def to_blame(members: tuple[Member, ...], failures: Failures) -> set[str]:
    """Members that failed by themselves; a limit that everybody missed says nothing about anyone."""
    own = {
        m.name: failures[m.name]
        for m in members
        if m.name in failures and not isinstance(failures[m.name], NOT_ITS_FAULT)
    }
    late = {name for name, error in own.items() if isinstance(error, DeadlineExceeded)}
    return set(own) - late if len(late) == len(members) > 1 else set(own)
