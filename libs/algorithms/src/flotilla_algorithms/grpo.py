"""Group-relative advantages.

Invariants: the advantages of a group sum to zero; a group of equal rewards gets exact zeros and so teaches
nothing; groups may differ in size and are told apart by their sizes alone, in the order of the samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flotilla_algorithms.rewards import finite_rewards

STD_EPSILON = 1e-6
"""Keeps groups with nearly equal rewards from exploding when they are divided by their deviation."""


def group_advantages(
    rewards: ArrayLike,
    group_sizes: ArrayLike,
    *,
    normalize_std: bool = False,
    std_epsilon: float = STD_EPSILON,
) -> NDArray[np.float64]:
    """Reward minus the mean of its group, over the group's standard deviation where asked for.

    The deviation is the sample one (divided by n - 1); a group of one has advantage zero.
    """
    values = finite_rewards(rewards)
    sizes = np.asarray(group_sizes, dtype=np.int64)
    if sizes.ndim != 1 or (sizes < 1).any() or sizes.sum() != values.size:
        raise ValueError(f"group sizes {sizes.tolist()} do not cut {values.size} rewards into groups")
    if not values.size:
        return values
    starts = np.cumsum(sizes) - sizes
    # Measuring from the group's first reward makes equal rewards cancel exactly, whatever their value.
    relative = values - np.repeat(values[starts], sizes)
    centred: NDArray[np.float64] = relative - np.repeat(np.add.reduceat(relative, starts) / sizes, sizes)
    if not normalize_std:
        return centred
    variance = np.add.reduceat(centred**2, starts) / np.maximum(sizes - 1, 1)
    scaled: NDArray[np.float64] = centred / (np.repeat(np.sqrt(variance), sizes) + std_epsilon)
    return scaled
