"""On-policy optimisation with the optimal baseline (OPO)."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.outcomes import Floats, Outcomes


def opo(outcomes: Outcomes) -> Floats:
    """Reward minus the mean of its group weighted by length, which minimises the variance of the gradient."""
    lengths = outcomes.trained_lengths.astype(np.float64)
    totals, sizes = outcomes.totals, outcomes.group_sizes
    first = np.repeat(totals[np.cumsum(sizes) - sizes], sizes)
    # From the group's first reward on, so that equal rewards cancel exactly.
    relative = totals - first
    weight = np.maximum(outcomes.group_sums(lengths), 1.0)
    advantages: Floats = relative - np.repeat(outcomes.group_sums(lengths * relative) / weight, sizes)
    return advantages
