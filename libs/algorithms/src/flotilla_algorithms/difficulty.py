"""Which groups are worth training on.

Invariant: a group is kept or left out as a whole, by the rewards that it got and not by what was made of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms.outcomes import Outcomes


def uniform_groups(outcomes: Outcomes) -> NDArray[np.bool_]:
    """One a group: all its rewards are equal, so that comparing them says nothing."""
    sizes, rewards = outcomes.group_sizes, outcomes.rewards
    first = np.repeat(rewards[np.cumsum(sizes) - sizes], sizes)
    uniform: NDArray[np.bool_] = outcomes.group_sums((rewards != first).astype(np.float64)) == 0
    return uniform


def kept_groups(
    outcomes: Outcomes, *, drop_uniform: bool, mean_above: float | None, mean_below: float | None
) -> NDArray[np.bool_]:
    """One a group: not uniform where those are dropped, and its mean reward strictly between the limits."""
    kept = np.ones(outcomes.group_sizes.size, np.bool_)
    if drop_uniform:
        kept &= ~uniform_groups(outcomes)
    means = outcomes.group_sums(outcomes.rewards) / outcomes.group_sizes
    if mean_above is not None:
        kept &= means > mean_above
    if mean_below is not None:
        kept &= means < mean_below
    return kept
