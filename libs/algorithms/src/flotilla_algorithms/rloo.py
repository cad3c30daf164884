"""REINFORCE leave-one-out (RLOO)."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes


def rloo(outcomes: Outcomes) -> Floats:
    """Reward minus the mean of the others of its group; a sample without others gets zero."""
    sizes = outcomes.group_sizes
    # r - (S - r) / (n - 1) is n / (n - 1) times the distance from the whole group's mean.
    factor = np.repeat(sizes / np.maximum(sizes - 1, 1), sizes)
    advantages: Floats = factor * group_advantages(outcomes.totals, sizes)
    return advantages
