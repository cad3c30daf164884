"""What a sync did, for whoever checks and records it."""

from __future__ import annotations

from dataclasses import dataclass

from flotilla_coordinator.weights.members import Member
from flotilla_core.version import Version


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved and cost."""

    version: Version
    bytes: int
    stage_s: float
    stall_s: float
    members: tuple[Member, ...]
    epochs: int
    caught_up: bool = False
    """Whether the members came after the version had been published, and took it in a group of their own."""
