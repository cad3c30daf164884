"""Advantages of samples that are several steps in an environment: GiGPO, and returns by step.

Invariants: a step counts once however many tokens it has; discounting is by step and never by token; context is passed
over.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from flotilla_algorithms.advantages import discounted, group_advantages
from flotilla_algorithms.outcomes import NO_STATE, Floats, Ints, Outcomes
from flotilla_algorithms.turns import Turns


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
    counts = np.array([len(sample) for sample in steps], dtype=np.int64)
    earned = np.array([step.reward for sample in steps for step in sample])
    numbers: dict[Hashable, int] = {}
    states = [numbers.setdefault(step.state, len(numbers)) for sample in steps for step in sample]
    met = _beside_equal_states(
        discounted(earned, counts, gamma), counts, np.array(states, np.int64), outcomes, normalize_std
    )
    whole = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=normalize_std)
    lengths = [step.tokens for sample in steps for step in sample]
    advantages: Floats = outcomes.to_tokens(whole) + step_weight * np.repeat(met, lengths)
    return advantages


def gigpo_of_turns(outcomes: Outcomes, *, gamma: float, step_weight: float, normalize_std: bool) -> Floats:
    """Return the same where a step is a turn.

    Each turn earns what came with it, the last one the rest of the reward; each penalty is that of its token's turn. A
    turn without a state is compared with no other.
    """
    turns = Turns.of(outcomes)
    states = _states(outcomes, turns)
    returns = discounted(turns.sums(outcomes.gains()), turns.counts, gamma)
    met = _beside_equal_states(returns, turns.counts, states, outcomes, normalize_std)
    met[states == NO_STATE] = 0.0
    whole = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=normalize_std)
    return outcomes.to_tokens(whole) + step_weight * turns.to_tokens(met, outcomes)


def compared_share(outcomes: Outcomes) -> float:
    """Return the share of turns that were asked in the state of another turn of their group."""
    turns = Turns.of(outcomes)
    states = _states(outcomes, turns)
    pairs = np.stack([_groups(turns.counts, outcomes), states])
    _, part, count = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    compared = (count[part.ravel()] > 1) & (states != NO_STATE)
    return float(compared.mean()) if compared.size else 0.0


def _states(outcomes: Outcomes, turns: Turns) -> Ints:
    """Return the key of the state of each turn."""
    if outcomes.turn_states is None:
        raise ValueError("gigpo needs the state in which each turn was asked")
    return outcomes.turn_states[outcomes.trained][turns.last]


def _groups(counts: Ints, outcomes: Outcomes) -> Ints:
    """Return the number of the group of each step; `counts` has the number of steps of each sample."""
    return np.repeat(np.repeat(np.arange(outcomes.group_sizes.size), outcomes.group_sizes), counts)


def _beside_equal_states(
    returns: Floats, counts: Ints, states: Ints, outcomes: Outcomes, normalize_std: bool
) -> Floats:
    """Return each return less the mean of those of its group that were taken in its state.

    `counts` has the number of returns of each sample. Equal states keep the order of their samples, so that each sum
    is made in an order that other states and other groups do not change.
    """
    groups = _groups(counts, outcomes)
    order = np.lexsort((states, groups))
    changes = (np.diff(groups[order]) != 0) | (np.diff(states[order]) != 0)
    edges = np.concatenate([[0], np.flatnonzero(changes) + 1, [returns.size]])
    met = np.zeros(returns.size)
    met[order] = group_advantages(returns[order], np.diff(np.unique(edges)), normalize_std=normalize_std)
    return met


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
    """Return the same where a step is a turn.

    Each turn earns what came with it, the last one the rest of the reward; each penalty is that of its token's turn.
    """
    turns = Turns.of(outcomes)
    returns = discounted(turns.sums(outcomes.gains()), turns.counts, gamma)
    return turns.to_tokens(_compared(returns, turns.counts, outcomes, baseline, normalize_std), outcomes)


def _compared(
    returns: Floats, counts: Ints, outcomes: Outcomes, baseline: str, normalize_std: bool
) -> Floats:
    """Return the returns less the mean of those that they are compared with: all steps of the group or of the batch."""
    if baseline == "none":
        return returns
    sizes = outcomes.group_sums(counts.astype(np.float64)).astype(np.int64)
    parts = sizes[sizes > 0] if baseline == "group" else [returns.size]
    return group_advantages(returns, parts, normalize_std=normalize_std)
