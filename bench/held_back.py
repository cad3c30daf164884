"""GRPO's advantage, after a wait: an update of a large model, without its work."""

from __future__ import annotations

import time

from flotilla_algorithms.advantages import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes


def group_relative(outcomes: Outcomes, *, seconds: float) -> Floats:
    """What `grpo` gives, so much later; the trainer's front asks once an update."""
    time.sleep(seconds)
    return group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=True)
