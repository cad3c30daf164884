"""Returns by step: what a sample did in one step is worth what that step and the later ones earned.

Invariants: a step counts once however many tokens it has; discounting is by step and never by token; context is passed
over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flotilla_algorithms.gigpo import Step, check_steps
from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Ints, Outcomes
from flotilla_algorithms.reinforce import discounted


def step_reinforce(
    outcomes: Outcomes,
    steps: Sequence[Sequence[Step]],
    *,
    gamma: float = 1.0,
    baseline: str = "group",
    normalize_std: bool = True,
) -> Floats:
    """Return one a token: the return of its step, by the rewards of the steps themselves, compared as `baseline` says.

    `steps` has those of every sample.
    """
    check_steps(outcomes, steps)
    counts = np.array([len(sample) for sample in steps], dtype=np.int64)
    earned = np.array([step.reward for sample in steps for step in sample])
    values = _compared(discounted(earned, counts, gamma), counts, outcomes, baseline, normalize_std)
    advantages: Floats = np.repeat(values, [step.tokens for sample in steps for step in sample])
    return advantages


def step_reinforce_of_turns(
    outcomes: Outcomes, *, gamma: float, baseline: str, normalize_std: bool
) -> Floats:
    """Return the same where a step is a turn: a run of trained tokens, up to the next context or the end.

    The reward comes with the last turn of a sample, each penalty with the turn of its token.
    """
    own = outcomes.trained
    first = np.zeros(own.size, np.bool_)
    first[np.cumsum(outcomes.response_lengths) - outcomes.response_lengths] = True
    begins = own & (first | ~np.concatenate([[False], own[:-1]]))
    counts = outcomes.sample_sums(begins.astype(np.float64)).astype(np.int64)
    turn = np.cumsum(begins)[own] - 1
    paid = np.bincount(turn, outcomes.penalties[own], minlength=int(begins.sum()))
    earned: Floats = -paid.astype(np.float64)
    earned[(np.cumsum(counts) - 1)[counts > 0]] += outcomes.rewards[counts > 0]
    values = _compared(discounted(earned, counts, gamma), counts, outcomes, baseline, normalize_std)
    advantages = np.zeros(own.size)
    advantages[own] = values[turn]
    return advantages


def _compared(
    returns: Floats, counts: Ints, outcomes: Outcomes, baseline: str, normalize_std: bool
) -> Floats:
    """Return the returns less the mean of those that they are compared with: all steps of the group or of the batch."""
    if baseline == "none":
        return returns
    sizes = outcomes.group_sums(counts.astype(np.float64)).astype(np.int64)
    parts = sizes[sizes > 0] if baseline == "group" else [returns.size]
    return group_advantages(returns, parts, normalize_std=normalize_std)
