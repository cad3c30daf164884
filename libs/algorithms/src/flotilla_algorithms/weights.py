"""Weights of an update: how much each token, sample and group of it counts.

Invariants: weights follow from the whole update and its seed, never from how it is cut, over how many ranks it is
spread or in which order it comes. The weights of tokens already hold the denominator, so what is left to do is a plain
sum. Only ratios of sample weights matter, because means over an update divide by their sum; a sample of weight zero
counts nowhere. Importance weights are those that the ranks take, in float64; a token, a stretch or a sequence is one
weight, however many tokens it has. A group is kept or left out as a whole, by the rewards that it got and not by what
was made of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms.outcomes import Floats, Ints, Outcomes, segment_sums

LARGEST_LOG = 700.0
"""The limit of a log ratio: its exponential is above every cap, and still a float."""

Mask = NDArray[np.bool_]


def token_weights(
    aggregation: str,
    response_lengths: Ints,
    counted: NDArray[np.bool_],
    constant_tokens: int,
    sample_weights: Floats | None = None,
) -> Floats:
    """Return one a token, zero where it is not counted; with weights of the samples every mean is a weighted one.

    token_mean: every token alike. sequence_mean_of_token_sum: every sequence counts by its summed tokens.
    sequence_mean_of_token_mean: every sequence alike. constant: as the sum, over a fixed number of tokens. token_sum:
    every token by itself, over nothing.
    """
    tokens = segment_sums(counted.astype(np.float64), response_lengths)
    shares = np.ones(tokens.size) if sample_weights is None else sample_weights
    # Nothing counts where these are zero, and nothing is divided.
    sequences = float(shares[tokens > 0].sum()) or 1.0
    denominators: dict[str, float | Floats] = {
        "token_mean": float(shares @ tokens) or 1.0,
        "sequence_mean_of_token_sum": sequences,
        "sequence_mean_of_token_mean": sequences * np.repeat(np.maximum(tokens, 1.0), response_lengths),
        "constant": sequences * constant_tokens,
        "token_sum": 1.0,
    }
    if aggregation not in denominators:
        raise ValueError(f"there is no aggregation {aggregation!r}: choose from {', '.join(denominators)}")
    share = np.repeat(shares, response_lengths)
    weights: Floats = np.where(counted, share / denominators[aggregation], 0.0)
    return weights


def counted_units(
    aggregation: str,
    response_lengths: Ints,
    counted: NDArray[np.bool_],
    sample_weights: Floats | None = None,
) -> float:
    """Return what the weights of an update share: its tokens for token_mean, else its sequences with a counted one.

    Weights times their units depend on nothing else in the update, so parts of it add up; the sum over the sum of their
    units is the whole. The parts of a token_sum add up as they are: it is one unit, however many parts there are.
    """
    if aggregation == "token_sum":
        return float(counted.any())
    tokens = segment_sums(counted.astype(np.float64), response_lengths)
    shares = np.ones(tokens.size) if sample_weights is None else sample_weights
    return float(shares @ tokens) if aggregation == "token_mean" else float(shares[tokens > 0].sum())


def reward_weights(rewards: Floats, group_sizes: Ints, *, kind: str, power: float) -> Floats:
    """Return the share that policy filtration (PF-PPO) gives each sample, in expectation instead of by drawing.

    pow: the reward's size to a power. max_min: half of a group's weight to its best samples, half to its worst.
    max_random: half to its best samples, half to all others. A group of equal rewards weighs its samples alike.
    """
    if kind == "pow":
        powers: Floats = np.abs(rewards) ** power
        return powers
    best = np.maximum.reduceat(rewards, np.cumsum(group_sizes) - group_sizes) if rewards.size else rewards
    worst = np.minimum.reduceat(rewards, np.cumsum(group_sizes) - group_sizes) if rewards.size else rewards
    first = rewards == np.repeat(best, group_sizes)
    last = rewards == np.repeat(worst, group_sizes) if kind == "max_min" else ~first
    halves = _half(first, group_sizes) + _half(last, group_sizes)
    weights: Floats = np.where(np.repeat(best > worst, group_sizes), halves, 1.0)
    return weights


def difficulty_weights(rewards: Floats, group_sizes: Ints, *, easiest: float, hardest: float) -> Floats:
    """Return a weight on the line from `easiest` to `hardest`, where the mean reward of a group falls from 1 to 0."""
    solved = np.clip(segment_sums(rewards, group_sizes) / np.maximum(group_sizes, 1), 0.0, 1.0)
    weights: Floats = np.repeat(hardest + (easiest - hardest) * solved, group_sizes)
    return weights


def length_weights(lengths: Ints, *, shortest: float, longest: float) -> Floats:
    """Return a weight on the line from that of the shortest response of the update to that of its longest."""
    spread = int(np.ptp(lengths)) if lengths.size else 0
    place = (lengths - (lengths.min() if lengths.size else 0)) / max(spread, 1)
    weights: Floats = shortest + (longest - shortest) * place
    return weights


def _half(chosen: NDArray[np.bool_], group_sizes: Ints) -> Floats:
    """Return half of each group's samples as weight, spread over the chosen ones of the group."""
    counts = np.maximum(segment_sums(chosen.astype(np.float64), group_sizes), 1.0)
    share: Floats = np.where(chosen, np.repeat(0.5 * group_sizes / counts, group_sizes), 0.0)
    return share


def mean_importance(
    log_ratio: Floats, units: Ints, counted: NDArray[np.bool_], *, cap: float, floor: float | None
) -> float:
    """Return the mean of the weights of all units with a counted token; 1 where there are none, or all are 0.

    `units` numbers what has one weight: the product of the ratios of its counted tokens. With a floor it is 0 beyond
    the limits, without one at most `cap`.
    """
    _, numbers = np.unique(units[counted], return_inverse=True)
    sums = np.bincount(numbers, weights=log_ratio[counted])
    ratios = np.exp(np.minimum(sums, LARGEST_LOG))
    beyond = 0.0 if floor is not None else cap
    weights = np.where((ratios >= (floor or 0.0)) & (ratios <= cap), ratios, beyond)
    mean = float(weights.mean()) if weights.size else 0.0
    return mean or 1.0


def covariances(logprobs: Floats, advantages: Floats, counted: Mask) -> Floats:
    """One a token: its share of the covariance of log-probability and advantage; -inf where it is not counted."""
    if not counted.any():
        return np.full(logprobs.size, -np.inf)
    products = (logprobs - logprobs[counted].mean()) * (advantages - advantages[counted].mean())
    return np.where(counted, products, -np.inf)


def drawn_between(covariance: Floats, low: float, high: float, share: float, seed: int) -> Mask:
    """`share` of all counted tokens, drawn at random from those whose covariance lies between the limits (Clip-Cov)."""
    candidates = np.flatnonzero((covariance > low) & (covariance < high))
    count = min(int(share * np.isfinite(covariance).sum()), candidates.size)
    chosen = np.zeros(covariance.size, np.bool_)
    chosen[np.random.default_rng(seed).choice(candidates, count, replace=False)] = True
    return chosen


def highest(covariance: Floats, share: float) -> Mask:
    """`share` of all counted tokens: those with the highest covariance (KL-Cov)."""
    count = int(share * np.isfinite(covariance).sum())
    chosen = np.zeros(covariance.size, np.bool_)
    chosen[np.argsort(-covariance, kind="stable")[:count]] = True
    return chosen


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
