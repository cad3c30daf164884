"""Counts the prompts of a step by the settings of a run, for the queue that draws them and for the plan."""

from __future__ import annotations

import math

from flotilla_core.config import RolloutConfig

MOST_TIMES = 4
"""The limit of prompts, as a multiple of a batch, unless the configuration sets one."""


def issued_per_step(rollout: RolloutConfig) -> int:
    """Return the groups that are under way for a step at first, where none is left over from the step before."""
    return math.ceil(rollout.prompts_per_step * (1 + rollout.over_issue))


def steps_ahead(rollout: RolloutConfig) -> int:
    """Return the number of steps admitted ahead; with `over_issue`, one step of the bound is for leftover groups."""
    return max(0, rollout.max_staleness - 1) if rollout.over_issue else rollout.max_staleness


def most_prompts_per_step(rollout: RolloutConfig) -> int:
    """Return the limit of all prompts of a step, including those left over from the step before."""
    issued, dynamic = issued_per_step(rollout), rollout.dynamic_sampling
    if dynamic is None:
        return issued
    return max(issued, dynamic.max_prompts_per_step or MOST_TIMES * rollout.prompts_per_step)
