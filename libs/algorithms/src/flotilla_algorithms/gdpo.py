"""Group reward-decoupled normalisation (GDPO)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.whitening import whitened


def gdpo_of_terms(outcomes: Outcomes, *, weights: ArrayLike) -> Floats:
    """GDPO over the terms that the outcomes bring along."""
    if outcomes.terms is None:
        raise ValueError("gdpo needs every term of the rewards by itself")
    return gdpo(outcomes, outcomes.terms, weights)


def gdpo(outcomes: Outcomes, terms: ArrayLike, weights: ArrayLike) -> Floats:
    """Each term ([terms, samples]) normalised within its groups, then their weighted sum whitened over the update.

    Terms of different scale keep their say, where a sum of rewards would be ruled by the widest.
    """
    columns, factors = np.asarray(terms, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if columns.shape != (factors.size, outcomes.rewards.size):
        raise ValueError(f"terms of shape {columns.shape} do not belong to {factors.size} weights")
    total = np.zeros(outcomes.rewards.size)
    for column, factor in zip(columns, factors, strict=True):
        total += factor * group_advantages(column, outcomes.group_sizes, normalize_std=True)
    return whitened(outcomes.to_tokens(total), outcomes)
