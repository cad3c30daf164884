"""Objectives that are the same before every update."""

from __future__ import annotations

from typing import Any


class Unchanging:
    """Nothing of an update is remembered, so a checkpoint holds nothing of it."""

    def state(self) -> dict[str, Any]:
        """Updates change nothing here."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing has changed."""

    def adapt(self, metrics: dict[str, float], samples: int) -> None:
        """Nothing adapts from step to step."""
