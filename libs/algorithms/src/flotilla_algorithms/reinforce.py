"""REINFORCE: every token is credited with what comes after it."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.outcomes import Floats, Ints, Outcomes


def reinforce(outcomes: Outcomes, *, gamma: float) -> Floats:
    """Return what comes from each token on, discounted by the policy's own tokens alone.

    The reward comes with the last trained token, each penalty with its own; context is passed over and gets zero.
    """
    own, lengths = outcomes.trained, outcomes.trained_lengths
    gains = -outcomes.penalties[own]
    gains[(np.cumsum(lengths) - 1)[lengths > 0]] += outcomes.rewards[lengths > 0]
    advantages = np.zeros(own.size)
    advantages[own] = discounted(gains, lengths, gamma)
    return advantages


def discounted(values: Floats, lengths: Ints, factor: float) -> Floats:
    """sum over k >= t of factor^(k - t) values_k within each response, for all responses at once."""
    sums = np.zeros_like(values)
    place = np.cumsum(lengths) - 1
    behind = np.zeros(lengths.size)
    for from_end in range(int(lengths.max(initial=0))):
        reached = lengths > from_end
        behind[reached] = values[place[reached] - from_end] + factor * behind[reached]
        sums[place[reached] - from_end] = behind[reached]
    return sums
