"""What a batch says about itself, under the names of the metrics reference."""

from __future__ import annotations

from collections import Counter

import numpy as np

from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup
from flotilla_core.version import Version


def batch_metrics(batch: Batch, version: Version) -> dict[str, float]:
    """Rewards, lengths, staleness and who sampled what."""
    samples = batch.samples
    if not samples:
        return {}
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([len(sample.token_ids) for sample in samples])
    oldest = [sample.oldest_version() for sample in samples]
    staleness = np.array([version.step - v.step for v in oldest if v is not None] or [0])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/uniform_groups": _uniform_share(batch.groups),
        "tokens/response_mean": float(lengths.mean()),
        "tokens/response_total": float(lengths.sum()),
        "tokens/truncated_rate": float(np.mean([sample.truncated for sample in samples])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }
    greedy = [group.samples[0].greedy_reward for group in batch.groups]
    if known := [reward for reward in greedy if reward is not None]:
        metrics["reward/greedy_mean"] = float(np.mean(known))
    for name in sorted({group.data_set for group in batch.groups} - {""}):
        own = [group for group in batch.groups if group.data_set == name]
        metrics[f"reward/mean/{name}"] = float(np.mean([s.reward for group in own for s in group.samples]))
        metrics[f"reward/uniform_groups/{name}"] = _uniform_share(own)
        metrics[f"data/share/{name}"] = len(own) / len(batch.groups)
    for generator, count in Counter(sample.generator for sample in samples).items():
        metrics[f"generator/{generator}/samples"] = float(count)
    return metrics


def _uniform_share(groups: list[RolloutGroup]) -> float:
    return float(np.mean([group.uniform for group in groups]))
