"""How many prompts a step draws, and how far ahead."""

from __future__ import annotations

import math

from flotilla_core.config import RolloutConfig

MOST_TIMES = 4
"""As many prompts as a batch has groups, unless the configuration says how many."""


def issued_per_step(rollout: RolloutConfig) -> int:
    """Groups that are under way for a step at first, where nothing is left over from the step before."""
    return math.ceil(rollout.prompts_per_step * (1 + rollout.over_issue))


def steps_ahead(rollout: RolloutConfig) -> int:
    """Steps that are admitted beyond the one that is made; with `over_issue` one step of the bound is for waiting."""
    return max(0, rollout.max_staleness - 1) if rollout.over_issue else rollout.max_staleness


def most_prompts_per_step(rollout: RolloutConfig) -> int:
    """The limit of all prompts of a step, those that were left over from the step before among them."""
    issued, dynamic = issued_per_step(rollout), rollout.dynamic_sampling
    if dynamic is None:
        return issued
    return max(issued, dynamic.max_prompts_per_step or MOST_TIMES * rollout.prompts_per_step)
