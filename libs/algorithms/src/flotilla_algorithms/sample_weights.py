"""How much each sample of an update counts: by its reward within its group, the difficulty of its prompt, its length.

Invariants: a weight follows from the whole update and never from how it is cut; only ratios of weights matter, because
means over an update divide by their sum; a sample of weight zero counts nowhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms.outcomes import Floats, Ints, segment_sums


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
