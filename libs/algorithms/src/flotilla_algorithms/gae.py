"""Generalised advantage estimation, for those who have per-token values."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.reinforce import discounted


def gae(outcomes: Outcomes, values: ArrayLike, *, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of every token; `values` is the critic's estimate before each token.

    A response ends for good with its last trained token, which gets the reward: nothing is expected after it. Tokens
    that are context are passed over: they have no advantage, and return what was expected of them.
    """
    estimates = np.asarray(values, dtype=np.float64)
    if estimates.shape != outcomes.penalties.shape or not np.isfinite(estimates).all():
        raise ValueError(f"values must be {outcomes.penalties.size} finite numbers, one a token")
    own, lengths = outcomes.trained, outcomes.trained_lengths
    expected = estimates[own]
    last = (np.cumsum(lengths) - 1)[lengths > 0]
    following = np.append(expected[1:], 0.0)[: expected.size]
    following[last] = 0.0
    errors = gamma * following - expected - outcomes.penalties[own]
    errors[last] += outcomes.rewards[lengths > 0]
    advantages = np.zeros_like(estimates)
    advantages[own] = discounted(errors, lengths, gamma * lam)
    return advantages, advantages + estimates


def gae_of_values(outcomes: Outcomes, *, gamma: float, lam: float) -> Floats:
    """The advantages, from the values that came with the outcomes."""
    if outcomes.values is None:
        raise ValueError("gae needs the values of a critic")
    advantages, _ = gae(outcomes, outcomes.values, gamma=gamma, lam=lam)
    return advantages
