"""REINFORCE++: returns compared over the whole update, not within a prompt."""

from __future__ import annotations

from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.reinforce import reinforce
from flotilla_algorithms.whitening import whitened


def reinforce_plus_plus(outcomes: Outcomes, *, gamma: float) -> Floats:
    """Discounted returns, whitened over the trained tokens of the update."""
    return whitened(reinforce(outcomes, gamma=gamma), outcomes)


def reinforce_plus_plus_baseline(outcomes: Outcomes) -> Floats:
    """Reward minus the mean of its group, whitened over the trained tokens of the update."""
    centred = group_advantages(outcomes.totals, outcomes.group_sizes)
    return whitened(outcomes.to_tokens(centred), outcomes)
