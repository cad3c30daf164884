"""How far generation runs ahead of training, and what that holds in memory.

Invariant: the bounds are those that `rollouts/source.py` admits by; "at most" is before any group of them has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from flotilla_coordinator.plan.lines import Line, shown_bytes
from flotilla_coordinator.rollouts.prompt_queue import issued_per_step, steps_ahead
from flotilla_core.config import PolicyConfig, RunConfig

HELD_BYTES_PER_TOKEN = 4 + 4 + 6
"""Token id, logprob and text, which wait in the coordinator until their step is trained."""
HELD_BYTES_PER_SAMPLE = 2048
SHARE_OF_HOST = 0.25
"""Above this the plan warns: ledger, tokenizer and the other services want the host as well."""


def policy_line(config: RunConfig) -> Line:
    """Whether samples come from the version that they train, and if not, how old they may be."""
    ahead = config.rollout.max_staleness
    if not ahead:
        explanation = "on-policy: samples come from the version that they train"
    else:
        explanation = (
            f"off-policy by at most {ahead} {'step' if ahead == 1 else 'steps'}: generation overlaps training"
        )
    return "policy", f"max_staleness {ahead}", explanation


def groups_line(config: RunConfig, tokens_of_a_step: int) -> Line:
    """What is generated or waits to be trained at one time."""
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
    """A run that is over before its first update counts, old samples that nothing weighs, more than the host holds."""
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
    """Whether an update takes every sample as the policy's own, whichever version wrote it."""
    correction = algorithm.correction
    ratio_to_rollout = algorithm.loss.has_ratio and correction.proximal == "rollout"
    left_out = correction.sequence_low is not None or correction.sequence_high is not None
    return not ratio_to_rollout and correction.importance == "none" and not left_out


def _steps_at_once(config: RunConfig) -> int:
    return min(1 + steps_ahead(config.rollout), config.steps)


def groups_under_way(config: RunConfig) -> int:
    """Groups that are generated or wait to be trained at one time, at most."""
    rollout = config.rollout
    spare = issued_per_step(rollout) - rollout.prompts_per_step
    return _steps_at_once(config) * rollout.prompts_per_step + spare


def held_bytes(config: RunConfig, tokens_of_a_step: int) -> int:
    """What they take in the coordinator, at most."""
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    of_a_step = tokens_of_a_step * HELD_BYTES_PER_TOKEN + samples * HELD_BYTES_PER_SAMPLE
    return _steps_at_once(config) * of_a_step + tokens_of_a_step * _teacher_bytes(config)


def _teacher_bytes(config: RunConfig) -> int:
    """Of a token of the batch that is trained, which alone has what a teacher finds likeliest."""
    teacher = config.algorithm.teacher if isinstance(config.algorithm, PolicyConfig) else None
    return 0 if teacher is None else teacher.bytes_per_token
