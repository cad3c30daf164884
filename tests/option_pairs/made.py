"""What optimizer steps descend on, and how far two such results are apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

CHANGE = 1e-4
"""Relative difference from which an option counts as changing an update."""


@dataclass(frozen=True, eq=False)
class Made:
    """What optimizer steps descend on: losses, and gradients by logits or values."""

    losses: list[float] = field(default_factory=list)
    gradients: list[np.ndarray] = field(default_factory=list)

    def differs_from(self, other: Made) -> bool:
        if [g.shape for g in self.gradients] != [g.shape for g in other.gradients]:
            return True
        return distance(self, other) > CHANGE


def distance(one: Made, other: Made) -> float:
    """The largest difference, as a share of the largest gradient."""
    apart = [
        np.abs(mine - theirs).max() / max(np.abs(theirs).max(), 1e-3)
        for mine, theirs in zip(one.gradients, other.gradients, strict=True)
    ]
    apart += [
        abs(mine - theirs) / max(abs(theirs), 1.0)
        for mine, theirs in zip(one.losses, other.losses, strict=True)
    ]
    return max(apart, default=0.0)
