"""Mean and deviation of all rewards that a run has learned from so far."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.rewards import finite_rewards


@dataclass(frozen=True)
class RewardHistory:
    """Three numbers that stand for any number of rewards, and grow exactly."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def after(self, rewards: ArrayLike) -> Self:
        """With these rewards as well, in whatever parts they come."""
        values = finite_rewards(rewards)
        if not values.size:
            return self
        count = self.count + values.size
        distance = float(values.mean()) - self.mean
        return type(self)(
            count,
            self.mean + distance * values.size / count,
            self.squares
            + float(np.square(values - values.mean()).sum())
            + distance**2 * self.count * values.size / count,
        )

    @property
    def deviation(self) -> float:
        """The sample one, divided by n - 1; 0 for fewer than two."""
        return sqrt(self.squares / max(self.count - 1, 1))
