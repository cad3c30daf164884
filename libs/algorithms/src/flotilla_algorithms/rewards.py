"""Rewards as they enter the mathematics.

Invariant: nothing is computed from a reward that is not finite; the caller learns which one it was.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


class NonFiniteRewardError(ValueError):
    """A reward is NaN or infinite; `index` is its place among the rewards of the update."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"reward {index} is {value}")
        self.index = index
        self.value = value


def finite_rewards(rewards: ArrayLike) -> NDArray[np.float64]:
    """One reward a sample, as float64."""
    array = np.asarray(rewards, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"rewards must be one number a sample, got an array of shape {array.shape}")
    wrong = np.flatnonzero(~np.isfinite(array))
    if wrong.size:
        raise NonFiniteRewardError(int(wrong[0]), float(array[wrong[0]]))
    return array
