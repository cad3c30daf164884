"""ReMax: what a response earns beyond the greedy response to its prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.rewards import finite_rewards


def remax_of_greedy_rewards(outcomes: Outcomes) -> Floats:
    """ReMax over the greedy rewards that the outcomes bring along."""
    if outcomes.greedy_rewards is None:
        raise ValueError("remax needs the reward of a greedy response to each prompt")
    return remax(outcomes, outcomes.greedy_rewards)


def remax(outcomes: Outcomes, greedy_rewards: ArrayLike) -> Floats:
    """Reward minus that of the greedy response to the same prompt (one a group)."""
    greedy = finite_rewards(greedy_rewards)
    if greedy.shape != outcomes.group_sizes.shape:
        raise ValueError(f"{greedy.size} greedy rewards do not belong to {outcomes.group_sizes.size} groups")
    advantages: Floats = outcomes.totals - np.repeat(greedy, outcomes.group_sizes)
    return advantages
