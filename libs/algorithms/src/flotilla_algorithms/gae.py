"""Generalised advantage estimation, for those who have per-token values."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.reinforce import discounted


def gae(outcomes: Outcomes, values: ArrayLike, *, gamma: float, trace_decay: float) -> tuple[Floats, Floats]:
    """Advantages and returns of every token; `values` is the critic's estimate before each token.

    A response ends for good with its last token: nothing is expected after it.
    """
    estimates = np.asarray(values, dtype=np.float64)
    if estimates.shape != outcomes.penalties.shape or not np.isfinite(estimates).all():
        raise ValueError(f"values must be {outcomes.penalties.size} finite numbers, one a token")
    last = np.cumsum(outcomes.response_lengths) - 1
    following = np.append(estimates[1:], 0.0)
    following[last] = 0.0
    errors = gamma * following - estimates - outcomes.penalties
    errors[last] += outcomes.rewards
    advantages = discounted(errors, outcomes, gamma * trace_decay)
    return advantages, advantages + estimates
