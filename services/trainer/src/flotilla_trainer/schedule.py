"""The learning rate of each update.

Invariant: a function of the update's number alone, so a repeated or skipped update changes nothing for the others.
"""

from __future__ import annotations

import math

from flotilla.trainer.v1 import session_pb2 as pb


def learning_rate(optimizer: pb.Optimizer, peak: float, total_updates: int, update: int) -> float:
    """Rate of update `update` (the first is 0): linear warm-up to `peak`, then the schedule down to its final share."""
    warmup = optimizer.warmup_updates
    if update < warmup:
        return peak * (update + 1) / warmup
    if optimizer.schedule == pb.SCHEDULE_CONSTANT:
        return peak
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    remaining = 1.0 - progress
    if optimizer.schedule == pb.SCHEDULE_COSINE:
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (optimizer.final_lr_ratio + (1.0 - optimizer.final_lr_ratio) * remaining)
