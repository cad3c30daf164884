"""Which generator serves which version of this run.

Invariants: a replica is in here from its confirmed commit until it fails, or until it is left out of the group that
follows the policy; instances count, not names, so a restart serves nothing until it has committed.
"""

from __future__ import annotations

from collections.abc import Collection

from flotilla_coordinator.weights.held_weights import HeldWeights
from flotilla_core.version import Version


class Serving:
    """What each replica that serves this run took last."""

    def __init__(self) -> None:
        self._held: dict[str, HeldWeights] = {}

    def took(self, held: HeldWeights) -> None:
        """A commit was confirmed."""
        self._held[held.member.instance_id] = held

    def lost(self, instance_id: str) -> None:
        """It serves nothing of ours any more."""
        self._held.pop(instance_id, None)

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Whoever is left out, a drained replica say, will not follow the policy: it serves nothing of ours."""
        self._held = {key: held for key, held in self._held.items() if key in instance_ids}

    def serves(self, instance_id: str, version: Version) -> bool:
        """Whether a replica may be given work that needs `version` or newer."""
        live = self.live_version(instance_id)
        return live is not None and live >= version

    def live_version(self, instance_id: str) -> Version | None:
        """What a replica serves for this run."""
        held = self._held.get(instance_id)
        return held.version if held is not None else None

    def held(self) -> list[HeldWeights]:
        """All of them, by the names of their slots."""
        return sorted(self._held.values(), key=lambda one: one.member.name)
