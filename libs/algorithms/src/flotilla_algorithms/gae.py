"""Generalised advantage estimation, for those who have per-token values."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.reinforce import discounted


def gae(
    outcomes: Outcomes, values: ArrayLike, *, gamma: float, lam: float, bootstrap_truncated: bool
) -> tuple[Floats, Floats]:
    """Return advantages and returns of every token; `values` is the critic's estimate before each token.

    The reward comes with the last trained token of a response. After it nothing is expected, but where the response was
    cut off and `bootstrap_truncated` is true: there the critic's estimate after its last token stands for what would
    have come. Tokens that are context are passed over: they have no advantage, and return what was expected of them.
    """
    estimates = np.asarray(values, dtype=np.float64)
    if estimates.shape != outcomes.penalties.shape or not np.isfinite(estimates).all():
        raise ValueError(f"values must be {outcomes.penalties.size} finite numbers, one a token")
    own, lengths = outcomes.trained, outcomes.trained_lengths
    expected = estimates[own]
    last = (np.cumsum(lengths) - 1)[lengths > 0]
    following = np.append(expected[1:], 0.0)[: expected.size]
    following[last] = _expected_at_the_end(outcomes, bootstrap_truncated)[lengths > 0]
    errors = gamma * following - expected - outcomes.penalties[own]
    errors[last] += outcomes.rewards[lengths > 0]
    advantages = np.zeros_like(estimates)
    advantages[own] = discounted(errors, lengths, gamma * lam)
    return advantages, advantages + estimates


def _expected_at_the_end(outcomes: Outcomes, bootstrap_truncated: bool) -> Floats:
    """Return what is still to come after each response, one number a sample."""
    cut = outcomes.truncated
    if not bootstrap_truncated or cut is None or not cut.any():
        return np.zeros(outcomes.rewards.size)
    if outcomes.value_after is None:
        raise ValueError("gae needs what the critic expects after a response that was cut off")
    return np.where(cut, outcomes.value_after, 0.0)


def gae_of_values(outcomes: Outcomes, *, gamma: float, lam: float, bootstrap_truncated: bool) -> Floats:
    """Return the advantages, from the values that came with the outcomes."""
    if outcomes.values is None:
        raise ValueError("gae needs the values of a critic")
    advantages, _ = gae(
        outcomes, outcomes.values, gamma=gamma, lam=lam, bootstrap_truncated=bootstrap_truncated
    )
    return advantages
