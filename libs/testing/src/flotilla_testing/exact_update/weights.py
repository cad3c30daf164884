"""Weights of tokens, for the mean that each aggregation promises, and of the samples of an update."""

from __future__ import annotations

import numpy as np

from flotilla_core.config.algorithm import AggregationConfig
from flotilla_core.config.losses import SampleWeightsConfig
from flotilla_testing.exact_update.rollouts import Bools, Floats, Rollouts


def aggregation_weights(
    aggregation: AggregationConfig,
    rollouts: Rollouts,
    counted: Bools,
    of_sample: Floats,
    *,
    max_response_tokens: int,
) -> Floats:
    """One a token; the weighted sum over the counted ones is the mean in which a sample counts by its weight."""
    weight = np.zeros(len(counted))
    rows = {
        sample: own[counted[own]]
        for sample, own in enumerate(rollouts.own_tokens)
        if counted[own].any() and of_sample[sample] > 0
    }
    samples = sum(of_sample[sample] for sample in rows)
    tokens = sum(of_sample[sample] * len(row) for sample, row in rows.items())
    for sample, row in rows.items():
        share = {
            "token_mean": 1 / tokens,
            "sequence_mean_of_token_sum": 1 / samples,
            "sequence_mean_of_token_mean": 1 / samples / len(row),
            "constant": 1 / samples / (aggregation.constant_tokens or max_response_tokens),
            "token_sum": 1.0,
        }[aggregation.type]
        weight[row] = of_sample[sample] * share
    return weight


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
