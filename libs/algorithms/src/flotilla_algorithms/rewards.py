"""Transformations of rewards before advantages are made of them: normalised, shortened near the limit, or shuffled.

The distance of sampled tokens from a reference is here too, which may be subtracted from their rewards.

Invariants: mean and deviation come from the samples that are kept, and are applied to all; where none is kept, nothing
is subtracted. Rewards that are all alike are divided by nothing, so that no rounding is blown up. Shuffled rewards, the
control experiment, stay the same multiset, so everything but their meaning is kept; the permutation depends on the seed
alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flotilla_algorithms.advantages import STD_EPSILON
from flotilla_algorithms.outcomes import Floats, Ints, RewardHistory, finite_rewards, segment_sums

MAX_LOG_RATIO = 20.0
"""The log ratio from which on k3 no longer grows, however much likelier the reference finds a token."""
MAX_STEP = 0.2
"""Largest relative change of an adaptive coefficient, before it is spread over the horizon."""


def normalised_rewards(
    rewards: Floats,
    group_sizes: Ints,
    kept: NDArray[np.bool_],
    *,
    mean: str,
    std: str,
    clip: float | None,
    scale: float,
    history: RewardHistory,
) -> Floats:
    """Return scale times the rewards less their mean over their deviation, bounded by `clip` before it is scaled.

    `mean` and `std` are none, or those of the group, of the batch, or running: of all rewards in `history`, which
    includes these. The deviation is the sample one, divided by n - 1.
    """
    values = rewards
    if mean == "running":
        values = rewards - history.mean
    elif mean != "none":
        values = _centred(rewards, _parts(group_sizes, rewards.size, mean), kept)
    deviation = _deviations(rewards, group_sizes, kept, std, history)
    values = values / np.where(deviation > 0, deviation + STD_EPSILON, 1.0)
    if clip is not None:
        values = np.clip(values, -clip, clip)
    normalised: Floats = scale * values
    return normalised


def _parts(group_sizes: Ints, samples: int, kind: str) -> Ints:
    """Return the sizes of the parts that are compared: the groups, or the batch as a whole."""
    return group_sizes if kind == "group" else np.array([samples])


def _centred(values: Floats, sizes: Ints, kept: NDArray[np.bool_]) -> Floats:
    """Return each value less the mean of the kept ones of its part; a part of which nothing is kept stays as it is."""
    if not values.size:
        return values
    counts = segment_sums(kept.astype(np.float64), sizes)
    # From the first one of each part on, so that equal values cancel exactly.
    relative = values - np.repeat(values[np.cumsum(sizes) - sizes], sizes)
    means = segment_sums(np.where(kept, relative, 0.0), sizes) / np.maximum(counts, 1.0)
    centred: Floats = np.where(np.repeat(counts > 0, sizes), relative - np.repeat(means, sizes), values)
    return centred


def _deviations(
    rewards: Floats, group_sizes: Ints, kept: NDArray[np.bool_], kind: str, history: RewardHistory
) -> Floats:
    """Return for each sample the deviation that its reward is divided by; 0 where it is divided by nothing."""
    if kind in ("none", "running"):
        return np.full(rewards.size, history.deviation if kind == "running" else 0.0)
    sizes = _parts(group_sizes, rewards.size, kind)
    squares = np.where(kept, _centred(rewards, sizes, kept) ** 2, 0.0)
    counts = np.maximum(segment_sums(kept.astype(np.float64), sizes) - 1.0, 1.0)
    spread: Floats = np.repeat(np.sqrt(segment_sums(squares, sizes) / counts), sizes)
    return spread


def overlong_penalties(
    response_lengths: ArrayLike, *, limit: int, buffer_tokens: int, penalty: float
) -> Floats:
    """Return the change of the rewards: 0 up to `limit - buffer_tokens`, then linear down to -penalty at the limit."""
    into_buffer = np.asarray(response_lengths, dtype=np.float64) - (limit - buffer_tokens)
    fall: Floats = -penalty * np.clip(into_buffer / buffer_tokens, 0.0, 1.0)
    return fall


def shuffled_rewards(rewards: ArrayLike, seed: int) -> NDArray[np.float64]:
    """Return the rewards of a whole update in random order."""
    permuted: NDArray[np.float64] = np.random.default_rng(seed).permutation(finite_rewards(rewards))
    return permuted


def divergence(estimator: str, logprobs: Floats, reference: Floats) -> Floats:
    """One a token, of samples of the policy: k1, k2 (square), k3 (unbiased, never negative) or abs."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        bounded: Floats = np.maximum(difference, -MAX_LOG_RATIO)
        k3: Floats = np.expm1(-bounded) + bounded
        return k3
    if estimator == "abs":
        return np.abs(difference)
    raise ValueError(f"there is no estimator {estimator!r}: choose from k1, k2, k3, abs")


def adapted_coefficient(
    coefficient: float, measured: float, *, target: float, horizon_samples: float, samples: int
) -> float:
    """Return the next coefficient: larger where the measured divergence is above its target, smaller below."""
    error = min(max(measured / target - 1.0, -MAX_STEP), MAX_STEP)
    return coefficient * (1.0 + error * samples / horizon_samples)
