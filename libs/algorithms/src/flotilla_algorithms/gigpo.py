"""Group-in-group advantages (GiGPO), for those whose samples are several steps in an environment."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes


@dataclass(frozen=True)
class Step:
    """One step of a sample: the state that it was taken in, its share of the response, what it earned at once."""

    state: Hashable
    tokens: int
    reward: float


def gigpo(
    outcomes: Outcomes,
    steps: Sequence[Sequence[Step]],
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize_std: bool = True,
) -> Floats:
    """One a token: the sample's advantage within its group, and `step_weight` times that of its step.

    A step is compared, by what it and the later ones earn discounted by `gamma`, with the steps of the same group that
    were taken in the same state; one that is alone in its state says nothing by itself. `steps` has those of every
    sample.
    """
    check_steps(outcomes, steps)
    whole = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=normalize_std)
    groups = np.repeat(np.arange(outcomes.group_sizes.size), outcomes.group_sizes)
    places: dict[tuple[int, Hashable], list[int]] = {}
    returns: list[float] = []
    for group, sample in zip(groups.tolist(), steps, strict=True):
        for step, value in zip(sample, _returns(sample, gamma), strict=True):
            places.setdefault((group, step.state), []).append(len(returns))
            returns.append(value)
    own = np.zeros(len(returns))
    for members in places.values():
        compared = [returns[member] for member in members]
        own[members] = group_advantages(compared, [len(members)], normalize_std=normalize_std)
    lengths = [step.tokens for sample in steps for step in sample]
    advantages: Floats = outcomes.to_tokens(whole) + step_weight * np.repeat(own, lengths)
    return advantages


def _returns(sample: Sequence[Step], gamma: float) -> list[float]:
    later, returns = 0.0, []
    for step in reversed(sample):
        later = step.reward + gamma * later
        returns.append(later)
    return returns[::-1]


def check_steps(outcomes: Outcomes, steps: Sequence[Sequence[Step]]) -> None:
    """Refuse steps that do not make up the responses of their samples."""
    if len(steps) != outcomes.rewards.size:
        raise ValueError(
            f"the steps of {len(steps)} samples do not belong to {outcomes.rewards.size} rewards"
        )
    for number, (sample, length) in enumerate(zip(steps, outcomes.response_lengths.tolist(), strict=True)):
        tokens = sum(step.tokens for step in sample)
        if tokens != length or any(step.tokens < 1 for step in sample):
            raise ValueError(f"the steps of sample {number} have {tokens} tokens, its response has {length}")
