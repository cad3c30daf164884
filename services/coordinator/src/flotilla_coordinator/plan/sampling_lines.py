"""Describes the samples of a step, how they are drawn, and how far generation runs ahead, as lines of a run's plan.

Invariant: the bounds of samples in flight are those by which `rollouts/source.py` admits groups; "at most" is the bound
before any of these groups has ended.
"""

from __future__ import annotations

import math

from flotilla_coordinator.plan.chapter import Entries, Line, refusal, shown_bytes
from flotilla_coordinator.plan.run_facts import RunFacts
from flotilla_coordinator.rollouts.prompt_counts import issued_per_step, most_prompts_per_step, steps_ahead
from flotilla_core.agreement import EXPLAINED_BY_ROUNDING, LEAST_TOKENS, kv_policy
from flotilla_core.config import PolicyConfig, RolloutConfig, RunConfig, StackConfig
from flotilla_core.findings import warning

HELD_BYTES_PER_TOKEN = 4 + 4 + 6
"""A token id, a log-probability and text, which the coordinator holds until their step is trained."""
HELD_BYTES_PER_SAMPLE = 2048
SHARE_OF_HOST = 0.25
"""The plan warns above this share, because the ledger, the tokenizer and the other services need memory as well."""


def step_chapter(run: RunFacts) -> Entries:
    """Say what a step is made of: given answers, or samples and how they are generated."""
    config, rollout, samples, prompt_tokens = (
        run.config,
        run.config.rollout,
        run.samples,
        run.data.longest_prompt,
    )
    if run.given:
        yield Line("step", f"{samples} sequences", f"rollout.prompts_per_step prompts with their {run.given}")
        yield from run.limit.answers_beyond(run.longest)
        if isinstance(config.algorithm, PolicyConfig) and _trusts_old_samples(config.algorithm):
            yield warning(
                "recorded samples come from another policy than the one that is trained, and nothing in "
                f"{config.algorithm.type} as it is set looks at how far apart they are: set "
                "algorithm.correction.importance to token"
            )
        return
    yield from canary_errors(config, run.data.kept)
    replicas = max(run.stack.generator.replicas, 1)
    yield Line(
        "step",
        f"{samples} samples",
        f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples; "
        f"about {math.ceil(samples / replicas)} for each of {replicas} generator(s)",
    )
    yield from _draws(config)
    yield Line(
        "tokens of a step",
        f"at most {run.step_tokens:,}",
        f"{samples} x ({prompt_tokens} prompt + {run.response_tokens} response)"
        if config.environment is None
        else f"{samples} x {run.longest} of an episode (environment.episode_tokens)",
    )
    yield from quantization(config, run.stack)
    if config.loop == "coordinator":
        yield policy_line(config)
        yield kv_line(config, run.stack, prompt_tokens)
        yield groups_line(config, run.step_tokens)
        yield from asynchrony_warnings(config, run.step_tokens, run.host)
    if config.environment is not None:
        yield from run.limit.episodes_beyond(run.longest)
        return
    key = "rollout.sampling.max_response_tokens"
    yield from run.limit.responses_beyond(prompt_tokens, run.response_tokens, key)


def canary_errors(config: RunConfig, rows: int) -> Entries:
    """Refuse a live check that can decide nothing: too few tokens, or a limit that nothing is above."""
    canary = config.weights.canary
    prompts = min(canary.prompts, rows)
    if not prompts or not canary.temperatures:
        return
    if prompts * canary.tokens < LEAST_TOKENS:
        yield refusal(
            f"weights.canary compares {prompts * canary.tokens} tokens of each generator, too few to tell weights of "
            f"another model from rounding: raise weights.canary.tokens or weights.canary.prompts to {LEAST_TOKENS} "
            "tokens in all (the default is 256), or set weights.canary.prompts to 0"
        )
    if canary.fail_at == 1:
        yield refusal(
            "weights.canary.fail_at is 1, and no mean difference of probabilities is above that: lower it, or set "
            "weights.canary.prompts to 0"
        )


def _draws(config: RunConfig) -> Entries:
    """Say how many prompts a step may draw, where that is not what it trains, and what greedy responses come on top."""
    rollout, algorithm = config.rollout, config.algorithm
    dynamic, extra = rollout.dynamic_sampling is not None, ""
    if dynamic:
        extra += "; groups of equal rewards are replaced"
    if rollout.over_issue:
        extra += f"; what is left over waits within max_staleness {rollout.max_staleness}"
    if extra:
        yield Line(
            "prompts drawn for a step",
            f"at most {most_prompts_per_step(rollout)}",
            f"{issued_per_step(rollout)} under way at first for a batch of {rollout.prompts_per_step}{extra}",
        )
    if rollout.over_issue and rollout.max_staleness == 0:
        yield warning(
            "rollout.over_issue gives up whatever has not ended when a batch is full, for nothing may wait at "
            "rollout.max_staleness = 0: long responses are lost; set it to 1"
        )
    if not isinstance(algorithm, PolicyConfig):
        return
    advantage = algorithm.advantage
    if advantage.needs_greedy_reward:
        yield Line(
            "greedy responses",
            "1 a prompt",
            f"generated in addition to its {rollout.samples_per_prompt} samples and scored by the same rewards, "
            f"never trained: {advantage.type} compares with it",
        )
    if dynamic and advantage.needed_group_samples < 2:
        yield warning(
            f"rollout.dynamic_sampling drops groups of equal rewards, from which advantage {advantage.type} "
            "would learn as well: leave it out"
        )


def policy_line(config: RunConfig) -> Line:
    """Say whether samples come from the version that they train, and if not, how old they may be."""
    ahead, explanation = (
        config.rollout.max_staleness,
        "on-policy: samples come from the version that they train",
    )
    if ahead:
        explanation = (
            f"off-policy by at most {ahead} {'step' if ahead == 1 else 'steps'}: generation overlaps training"
        )
    return Line("policy", f"max_staleness {ahead}", explanation)


def groups_line(config: RunConfig, tokens_of_a_step: int) -> Line:
    """Say how many groups are generated or wait to be trained at one time."""
    rollout, steps = config.rollout, _steps_at_once(config)
    spare, groups = _spare_groups(rollout), groups_under_way(config)
    return Line(
        "groups under way",
        f"at most {groups:,}",
        f"{steps} step(s) x {rollout.prompts_per_step} prompts{f' and {spare} more' if spare else ''}, "
        f"{groups * rollout.samples_per_prompt:,} samples; "
        f"about {shown_bytes(held_bytes(config, tokens_of_a_step))} in the coordinator",
    )


def kv_line(config: RunConfig, stack: StackConfig, prompt_tokens: int) -> Line:
    """Say what a sync does to the KV cache of the samples that run meanwhile, and the cost."""
    rollout, generator = config.rollout, stack.generator
    policy = kv_policy(config.weights, rollout.max_staleness)
    running = min(
        groups_under_way(config) * rollout.samples_per_prompt,
        max(generator.replicas, 1) * generator.max_running_samples,
    )
    again = f"{running * (prompt_tokens + rollout.sampling.max_response_tokens // 2):,} tokens"
    if policy == "drain":
        explanation = "each generator ends its running samples first"
    elif policy == "reuse":
        explanation = (
            "running samples keep the cache that older weights made; such tokens do not count for "
            f"algorithm.correction.warn_at and fail_at; recompute is exact, and computes about {again} again"
        )
    elif rollout.max_staleness:
        explanation = f"exact: a sync computes about {again} again; weights.kv_policy reuse saves that"
    else:
        explanation = "exact, at no cost: no sample of the run is under way at a sync"
    return Line("KV cache at a sync", policy, explanation)


def quantization(config: RunConfig, stack: StackConfig) -> Entries:
    """Say what quantized matrices bring; refuse to train their samples as if the trainer's policy had written them."""
    if (quantization := stack.generator.quantization) is None:
        return
    bound = EXPLAINED_BY_ROUNDING[quantization].warn_at
    yield Line(
        "rollout precision",
        quantization,
        "matrices of 8 bits, made of each version at its commit, which loads the whole model anew; trainer and "
        f"generator may differ by {bound:g} on the mean, which algorithm.correction corrects",
    )
    if isinstance(config.algorithm, PolicyConfig) and _trusts_old_samples(config.algorithm):
        yield refusal(
            f"generator.quantization is {quantization}, so samples come from another policy than the one that is "
            f"trained, and nothing in {config.algorithm.type} as it is set corrects that: set "
            "algorithm.correction.importance to token"
        )


def asynchrony_warnings(config: RunConfig, tokens_of_a_step: int, memory: int) -> Entries:
    """Warn of a run that ends before its first update counts, of uncorrected old samples, and of too much memory."""
    ahead = config.rollout.max_staleness
    if ahead and ahead >= config.steps:
        yield warning(
            f"rollout.max_staleness = {ahead} admits all {config.steps} steps at once: the first version may write "
            "every sample of the run; set it to a few steps"
        )
    if ahead and isinstance(config.algorithm, PolicyConfig) and _trusts_old_samples(config.algorithm):
        yield warning(
            f"rollout.max_staleness = {ahead} trains samples of older versions, and nothing in {config.algorithm.type} "
            "as it is set looks at how far the policy has moved since: set algorithm.correction.importance to token"
        )
    held = held_bytes(config, tokens_of_a_step)
    if SHARE_OF_HOST * memory < held <= memory:
        yield warning(
            f"groups under way may take {shown_bytes(held)} in the coordinator, whose host has "
            f"{shown_bytes(memory)}: lower rollout.max_staleness or rollout.prompts_per_step"
        )


def _trusts_old_samples(algorithm: PolicyConfig) -> bool:
    """Return whether an update takes every sample as the policy's own, whichever version generated it."""
    correction = algorithm.correction
    ratio_to_rollout = algorithm.loss.has_ratio and correction.proximal == "rollout"
    left_out = correction.rejection or (correction.sequence_low, correction.sequence_high) != (None, None)
    return not ratio_to_rollout and correction.importance == "none" and not left_out


def _steps_at_once(config: RunConfig) -> int:
    return min(1 + steps_ahead(config.rollout), config.steps)


def groups_under_way(config: RunConfig) -> int:
    """Return the largest number of groups that are generated or wait to be trained at one time."""
    rollout = config.rollout
    return _steps_at_once(config) * rollout.prompts_per_step + _spare_groups(rollout)


def _spare_groups(rollout: RolloutConfig) -> int:
    return issued_per_step(rollout) - rollout.prompts_per_step


def held_bytes(config: RunConfig, tokens_of_a_step: int) -> int:
    """Return the most memory that these groups take in the coordinator."""
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    of_a_step = tokens_of_a_step * HELD_BYTES_PER_TOKEN + samples * HELD_BYTES_PER_SAMPLE
    return _steps_at_once(config) * of_a_step + tokens_of_a_step * _teacher_bytes(config)


def _teacher_bytes(config: RunConfig) -> int:
    """Return the bytes of a teacher's likeliest tokens for one token; only the batch that is trained has them."""
    teacher = config.algorithm.teacher if isinstance(config.algorithm, PolicyConfig) else None
    return 0 if teacher is None else teacher.bytes_per_token
