"""What a batch says about itself, under the names of the metrics reference."""

from __future__ import annotations

from collections import Counter

import numpy as np

from flotilla_coordinator.runs.batch import Batch
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
    uniform = [len({sample.reward for sample in group.samples}) == 1 for group in batch.groups]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/uniform_groups": float(np.mean(uniform)),
        "tokens/response_mean": float(lengths.mean()),
        "tokens/response_total": float(lengths.sum()),
        "tokens/truncated_rate": float(np.mean([sample.truncated for sample in samples])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }
    for generator, count in Counter(sample.generator for sample in samples).items():
        metrics[f"generator/{generator}/samples"] = float(count)
    return metrics
