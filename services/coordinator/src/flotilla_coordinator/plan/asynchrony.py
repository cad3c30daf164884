"""Works out how far generation runs ahead of training, and how much memory that takes.

Invariant: the bounds are those by which `rollouts/source.py` admits groups; "at most" is the bound before any of these
groups has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from flotilla_coordinator.plan.lines import Line, shown_bytes
from flotilla_coordinator.rollouts.prompt_queue import issued_per_step, steps_ahead
from flotilla_core.config import PolicyConfig, RunConfig

HELD_BYTES_PER_TOKEN = 4 + 4 + 6
"""A token id, a log-probability and text, which the coordinator holds until their step is trained."""
HELD_BYTES_PER_SAMPLE = 2048
SHARE_OF_HOST = 0.25
"""The plan warns above this share, because the ledger, the tokenizer and the other services need memory as well."""


def policy_line(config: RunConfig) -> Line:
    """Say whether samples come from the version that they train, and if not, how old they may be."""
    ahead = config.rollout.max_staleness
    if not ahead:
        explanation = "on-policy: samples come from the version that they train"
    else:
        explanation = (
            f"off-policy by at most {ahead} {'step' if ahead == 1 else 'steps'}: generation overlaps training"
        )
    return "policy", f"max_staleness {ahead}", explanation


def groups_line(config: RunConfig, tokens_of_a_step: int) -> Line:
    """Say how many groups are generated or wait to be trained at one time."""
    rollout, steps = config.rollout, _steps_at_once(config)
    spare, groups = issued_per_step(rollout) - rollout.prompts_per_step, groups_under_way(config)
    return (
        "groups under way",
        f"at most {groups:,}",
        f"{steps} step(s) x {rollout.prompts_per_step} prompts{f' and {spare} more' if spare else ''}, "
        f"{groups * rollout.samples_per_prompt:,} samples; "
        f"about {shown_bytes(held_bytes(config, tokens_of_a_step))} in the coordinator",
    )


def asynchrony_warnings(config: RunConfig, tokens_of_a_step: int, memory: int) -> Iterator[str]:
    """Warn of a run that ends before its first update counts, of uncorrected old samples, and of too much memory."""
    ahead = config.rollout.max_staleness
    if ahead and ahead >= config.steps:
        yield (
            f"rollout.max_staleness = {ahead} admits all {config.steps} steps at once: the first version may write "
            "every sample of the run; set it to a few steps"
        )
    if ahead and isinstance(config.algorithm, PolicyConfig) and _trusts_old_samples(config.algorithm):
        yield (
            f"rollout.max_staleness = {ahead} trains samples of older versions, and nothing in {config.algorithm.type} "
            "as it is set looks at how far the policy has moved since: set algorithm.correction.importance to token"
        )
    held = held_bytes(config, tokens_of_a_step)
    if SHARE_OF_HOST * memory < held <= memory:
        yield (
            f"groups under way may take {shown_bytes(held)} in the coordinator, whose host has "
            f"{shown_bytes(memory)}: lower rollout.max_staleness or rollout.prompts_per_step"
        )


def _trusts_old_samples(algorithm: PolicyConfig) -> bool:
    """Return whether an update takes every sample as the policy's own, whichever version generated it."""
    correction = algorithm.correction
    ratio_to_rollout = algorithm.loss.has_ratio and correction.proximal == "rollout"
    left_out = correction.sequence_low is not None or correction.sequence_high is not None
    return not ratio_to_rollout and correction.importance == "none" and not left_out


def _steps_at_once(config: RunConfig) -> int:
    return min(1 + steps_ahead(config.rollout), config.steps)


def groups_under_way(config: RunConfig) -> int:
    """Return the largest number of groups that are generated or wait to be trained at one time."""
    rollout = config.rollout
    spare = issued_per_step(rollout) - rollout.prompts_per_step
    return _steps_at_once(config) * rollout.prompts_per_step + spare


def held_bytes(config: RunConfig, tokens_of_a_step: int) -> int:
    """Return the most memory that these groups take in the coordinator."""
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    of_a_step = tokens_of_a_step * HELD_BYTES_PER_TOKEN + samples * HELD_BYTES_PER_SAMPLE
    return _steps_at_once(config) * of_a_step + tokens_of_a_step * _teacher_bytes(config)


def _teacher_bytes(config: RunConfig) -> int:
    """Return the bytes of a teacher's likeliest tokens for one token; only the batch that is trained has them."""
    teacher = config.algorithm.teacher if isinstance(config.algorithm, PolicyConfig) else None
    return 0 if teacher is None else teacher.bytes_per_token
