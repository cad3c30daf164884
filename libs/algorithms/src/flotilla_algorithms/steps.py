"""Advantages of samples that are several steps in an environment: GiGPO, and returns by step.

Invariants: a step counts once however many tokens it has; discounting is by step and never by token; context is passed
over.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from flotilla_algorithms.advantages import discounted, group_advantages
from flotilla_algorithms.outcomes import Floats, Ints, Outcomes


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
    """Return the same where a step is a turn: a run of trained tokens, up to the next context, sequence or the end.

    Each turn earns what came with it, the last one the rest of the reward; each penalty is that of its token's turn.
    """
    own = outcomes.trained
    first = np.zeros(own.size, np.bool_) if outcomes.begins is None else outcomes.begins.copy()
    first[np.cumsum(outcomes.response_lengths) - outcomes.response_lengths] = True
    begins = own & (first | ~np.concatenate([[False], own[:-1]]))
    counts = outcomes.sample_sums(begins.astype(np.float64)).astype(np.int64)
    turn = np.cumsum(begins)[own] - 1
    earned: Floats = np.bincount(turn, outcomes.gains(), minlength=int(begins.sum())).astype(np.float64)
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
