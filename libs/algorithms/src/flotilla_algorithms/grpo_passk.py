"""Advantages for the best of k: the best sample of a group is worth what the group would lose without it."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.grpo import STD_EPSILON
from flotilla_algorithms.outcomes import Floats, Outcomes


def grpo_passk(outcomes: Outcomes, *, normalize_std: bool) -> Floats:
    """Return the largest reward of a group less its second largest for the best sample, and zero for all others.

    A group of one, or one whose best rewards are equal, gets zeros.
    """
    totals = outcomes.totals
    advantages = np.zeros(totals.size)
    for end, size in zip(
        np.cumsum(outcomes.group_sizes).tolist(), outcomes.group_sizes.tolist(), strict=True
    ):
        group = totals[end - size : end]
        if size < 2:
            continue
        second, first = np.sort(group)[-2:]
        scale = float(group.std(ddof=1)) + STD_EPSILON if normalize_std else 1.0
        advantages[end - size + int(group.argmax())] = (first - second) / scale
    return advantages
