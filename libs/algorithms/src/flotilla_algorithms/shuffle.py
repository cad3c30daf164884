"""The control experiment: rewards that say nothing about the samples that carry them.

Invariant: the rewards of an update stay the same multiset, so everything but their meaning is kept; the
permutation depends on the seed alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flotilla_algorithms.rewards import finite_rewards


def shuffled_rewards(rewards: ArrayLike, seed: int) -> NDArray[np.float64]:
    """The rewards of a whole update in random order."""
    permuted: NDArray[np.float64] = np.random.default_rng(seed).permutation(finite_rewards(rewards))
    return permuted
