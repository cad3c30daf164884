"""REINFORCE: every token is credited with what comes after it."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.outcomes import Floats, Ints, Outcomes


def reinforce(outcomes: Outcomes, *, gamma: float) -> Floats:
    """Discounted return from each token on: the reward comes with the last token, penalties with their own."""
    lengths = outcomes.response_lengths
    rewards = -outcomes.penalties
    rewards[np.cumsum(lengths) - 1] += outcomes.rewards
    return discounted(rewards, lengths, gamma)


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
