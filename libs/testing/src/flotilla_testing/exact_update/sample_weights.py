"""How much each sample of an update counts, by what it earned, how hard its prompt is and how long it is."""

from __future__ import annotations

import numpy as np

from flotilla_core.config.losses import SampleWeightsConfig
from flotilla_testing.exact_update.rollouts import Bools, Floats, Rollouts


def sample_weights(section: SampleWeightsConfig, rollouts: Rollouts, kept: Bools) -> Floats:
    """One a sample, from those that stay; 0 for the others."""
    weight = kept.astype(np.float64)
    for members in rollouts.members:
        stay = members[kept[members]]
        if not len(stay):
            continue
        rewards = rollouts.rewards[stay]
        weight[stay] *= _by_reward(section, rewards)
        if section.by_difficulty is not None:
            solved = min(max(rewards.mean(), 0.0), 1.0)
            weight[stay] *= (
                solved * section.by_difficulty.easiest + (1 - solved) * section.by_difficulty.hardest
            )
    if section.by_length is not None and kept.any():
        lengths = np.array([len(own) for own in rollouts.own_tokens], np.float64)
        first, last = lengths[kept].min(), lengths[kept].max()
        place = (lengths - first) / (last - first) if last > first else np.zeros(len(lengths))
        weight *= (1 - place) * section.by_length.shortest + place * section.by_length.longest
    return weight


def _by_reward(section: SampleWeightsConfig, rewards: Floats) -> Floats:
    count = len(rewards)
    if section.by_reward == "none":
        return np.ones(count)
    if section.by_reward == "pow":
        powers: Floats = np.abs(rewards) ** section.power
        return powers
    best, worst = rewards == rewards.max(), rewards == rewards.min()
    if best.all():
        return np.ones(count)
    others = worst if section.by_reward == "max_min" else ~best
    shares: Floats = count / 2 * (best / best.sum() + others / others.sum())
    return shares
