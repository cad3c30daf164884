"""Group-relative advantages (GRPO; without the deviation Dr. GRPO).

Invariants: the advantages of a group sum to zero; a group of equal rewards gets exact zeros and so teaches
nothing; groups may differ in size and are told apart by their sizes alone, in the order of the samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.outcomes import Floats, Outcomes, checked_sizes, segment_sums
from flotilla_algorithms.rewards import finite_rewards

STD_EPSILON = 1e-6
"""Keeps groups with nearly equal rewards from exploding when they are divided by their deviation."""


def grpo(outcomes: Outcomes, *, baseline: str, normalize_std: bool) -> Floats:
    """Reward minus its baseline over the deviation of the same: of its `group`, of the whole `batch`, or `running`.

    The running ones are those of all rewards that the run learned from, this update's included.
    """
    if baseline == "running":
        seen = outcomes.history.after(outcomes.totals)
        return (outcomes.totals - seen.mean) / (seen.deviation + STD_EPSILON if normalize_std else 1.0)
    sizes = [outcomes.rewards.size] if baseline == "batch" else outcomes.group_sizes
    return group_advantages(outcomes.totals, sizes, normalize_std=normalize_std)


def group_advantages(
    rewards: ArrayLike,
    group_sizes: ArrayLike,
    *,
    normalize_std: bool = False,
    std_epsilon: float = STD_EPSILON,
) -> Floats:
    """Reward minus the mean of its group, over the group's standard deviation where asked for.

    The deviation is the sample one (divided by n - 1); a group of one has advantage zero.
    """
    values = finite_rewards(rewards)
    sizes = checked_sizes(group_sizes, values.size)
    if not values.size:
        return values
    # Measuring from the group's first reward makes equal rewards cancel exactly, whatever their value.
    relative = values - np.repeat(values[np.cumsum(sizes) - sizes], sizes)
    centred: Floats = relative - np.repeat(segment_sums(relative, sizes) / sizes, sizes)
    if not normalize_std:
        return centred
    variance = segment_sums(centred**2, sizes) / np.maximum(sizes - 1, 1)
    scaled: Floats = centred / (np.repeat(np.sqrt(variance), sizes) + std_epsilon)
    return scaled
