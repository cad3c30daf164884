"""Describes what is optimised, how samples become updates, and how far generation runs ahead, as lines of a run's plan.

Invariants: the way an update is cut never changes its result, so none is refused. The number of micro-batches holds for
padded and for packed rows: it is exact when all sequences are as long as the longest, and shorter ones never need more.
The bounds of samples in flight are those by which `rollouts/source.py` admits groups; "at most" is the bound before any
of these groups has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flotilla_coordinator.plan.lines import Line, shown_bytes
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.rollouts.prompt_queue import issued_per_step, steps_ahead
from flotilla_coordinator.trainers.spec import critic_warmup_steps
from flotilla_core.agreement import EXPLAINED_BY_ROUNDING, kv_policy
from flotilla_core.config import (
    AlgorithmConfig,
    DpoConfig,
    PolicyConfig,
    RewardModelConfig,
    RunConfig,
    StackConfig,
    TrainerConfig,
)
from flotilla_core.config.algorithm import CorrectionConfig, KlConfig, RejectionConfig
from flotilla_core.config.losses import GspoLoss
from flotilla_core.config.training import TeacherConfig
from flotilla_core.gangs import gang_of, model_of, roles_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import POLICY, section_of

HELD_BYTES_PER_TOKEN = 4 + 4 + 6
"""A token id, a log-probability and text, which the coordinator holds until their step is trained."""
HELD_BYTES_PER_SAMPLE = 2048
SHARE_OF_HOST = 0.25
"""The plan warns above this share, because the ledger, the tokenizer and the other services need memory as well."""


def algorithm_lines(algorithm: AlgorithmConfig) -> Iterator[Line]:
    """Describe each section of the algorithm in one line; a section that is off has none."""
    if algorithm.type == "sft":
        yield "algorithm", "sft", "cross-entropy of the answers, mean over all tokens of the update"
        return
    if isinstance(algorithm, RewardModelConfig):
        center = algorithm.center_coefficient
        centred = f"; {center:g} x the squared sum of both rewards keeps them around zero" if center else ""
        yield (
            "algorithm",
            algorithm.type,
            f"a head of one number learns by pairs to give the preferred answer the higher one{centred}",
        )
        return
    if isinstance(algorithm, DpoConfig):
        reference = "nothing" if algorithm.reference_free else "the first policy"
        shown = {"beta": algorithm.beta, "label_smoothing": algorithm.label_smoothing or None}
        yield (
            "algorithm",
            algorithm.type,
            f"{algorithm.loss} of pairs, compared with {reference}; {_settings(shown)}",
        )
        return
    control = ", control: rewards are shuffled" if algorithm.shuffle_rewards else ""
    yield "algorithm", algorithm.type, f"a preset; docs/algorithms.md has the formulas{control}"
    shared = {key: value for key, value in algorithm.advantage if key not in algorithm.advantage.arguments}
    switched_on = {key: value for key, value in shared.items() if value and key not in ("type", "parameters")}
    yield (
        "advantage",
        algorithm.advantage.type,
        _settings(algorithm.advantage.arguments | switched_on),
    )
    bonuses = {key: value for key, value in algorithm if value and isinstance(value, float)}
    yield "loss", algorithm.loss.type, _settings(algorithm.loss.arguments | bonuses)
    constant = algorithm.aggregation.constant_tokens or "rollout.sampling.max_response_tokens"
    yield (
        "aggregation",
        algorithm.aggregation.type,
        f"over {constant}" if algorithm.aggregation.type == "constant" else "counted over the whole update",
    )
    yield from _correction(algorithm.correction)
    yield from _divergence(algorithm.kl)
    if algorithm.teacher is not None:
        yield _taught(algorithm.teacher)


def algorithm_warnings(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Warn of settings that would run, but teach badly."""
    if not isinstance(algorithm, PolicyConfig):
        return
    loss, kl = algorithm.loss, algorithm.kl
    if isinstance(loss, GspoLoss) and algorithm.correction.proximal == "rollout":
        yield (
            "algorithm.loss gspo clips ratios beyond "
            f"1 - {loss.clip_low:g} and 1 + {loss.clip_high:g}, and with "
            "algorithm.correction.proximal rollout they hold what generator and trainer compute differently, which is "
            "more than that on most GPUs: set it to trainer"
        )
    if kl.placement == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator k1 with algorithm.kl.placement loss adds noise and holds nothing back, for the "
            "gradient of log p - log q is that of log p, which is zero on average: set the estimator to k2, k3 or "
            "full, or the placement to reward"
        )


def _correction(correction: CorrectionConfig) -> Iterator[Line]:
    usual = CorrectionConfig()
    changed = {key: value for key, value in correction if value != getattr(usual, key)}
    if changed:
        yield "correction", correction.importance, _settings(changed)


def _divergence(kl: KlConfig) -> Iterator[Line]:
    if kl.placement != "none":
        adaptive = "" if kl.target is None else f", adapts to {kl.target:g} a token"
        yield (
            "divergence",
            f"in the {kl.placement}",
            f"{kl.estimator} from the first policy, coefficient {kl.coefficient:g}{adaptive}",
        )


def _taught(teacher: TeacherConfig) -> Line:
    others = ", all others as one more" if teacher.tail else ""
    by = "" if teacher.teacher_field is None else f" by {teacher.teacher_field}"
    asked = f"; asked: {' and '.join(teacher.teachers)}{by}" if teacher.teachers else ""
    return (
        "teacher",
        "in the loss",
        f"{teacher.divergence} divergence over its {teacher.top_k} likeliest tokens{others}, coefficient "
        f"{teacher.coefficient:g}{asked}",
    )


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items() if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(_shown(item) for item in value)
    if isinstance(value, dict):
        return " and ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, RejectionConfig):
        low = "" if value.low is None else f" below {value.low:g}"
        high = "" if value.high is None else f" above {value.high:g}"
        return f"of {value.measure} over {value.over}{low}{' or' if low and high else ''}{high}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class MicroBatches:
    """The number of micro-batches that the trainer cuts an update into."""

    sequences: int
    fed_tokens: int
    """Tokens of the longest sequence that are fed; its last token predicts nothing and is left out."""
    together: int
    """Number of longest sequences that fit the budget; 1 where not even one does."""
    per_rank: int
    """The most micro-batches of a rank; a rank without a sequence takes part with empty ones."""

    @classmethod
    def of(cls, sequences: int, longest: int, budget: int, ranks: int) -> MicroBatches:
        """Cut an update of `sequences` of up to `longest` tokens into micro-batches of up to `budget` tokens."""
        fed = longest - 1
        together = max(budget // fed, 1)
        return cls(sequences, fed, together, math.ceil(sequences / (together * ranks)))


def update_lines(config: RunConfig, cut: MicroBatches, samples: int, lanes: int) -> Iterator[Line]:
    """Describe the updates, their optimizer steps and micro-batches, and the learning rate."""
    optimizer, budget = config.optimizer, config.batching.microbatch_budget
    alone = critic_warmup_steps(config)
    updates = config.steps - alone
    after = f" after the {alone} in which only the critic learns" if alone else ""
    yield "updates", f"{updates}", f"one a step{after}, over all of its samples"
    yield (
        "optimizer steps",
        f"{optimizer.steps_of_an_update} an update",
        f"{_optimizer_steps(config)}; {updates * optimizer.steps_of_an_update:,} in the run",
    )
    yield (
        "micro-batches of an update",
        f"at most {cut.per_rank} a rank",
        f"{samples} sequences over {_counted(lanes, 'rank group', 'rank groups')}; up to {cut.together} sequences per "
        f"micro-batch: tokens_per_microbatch = {budget}, {cut.fed_tokens} tokens each; never changes the result",
    )
    end = optimizer.learning_rate * (1.0 if optimizer.schedule == "constant" else optimizer.final_lr_ratio)
    yield (
        "learning rate",
        f"{optimizer.learning_rate:g}",
        f"{optimizer.warmup_updates} updates of warm-up, then {optimizer.schedule} to {end:g} at update {updates}",
    )


def update_warnings(config: RunConfig, cut: MicroBatches, longest: int) -> Iterator[str]:
    """Warn of a sequence that is a micro-batch of its own; the longest one has `longest` tokens."""
    budget = config.batching.microbatch_budget
    if cut.fed_tokens > budget:
        yield (
            f"a sequence may have {longest} tokens, more than batching.tokens_per_microbatch = "
            f"{budget}: such a one is a micro-batch of its own"
        )


def spare_budget_warnings(config: RunConfig, cut: MicroBatches, lanes: int) -> Iterator[str]:
    """Warn of a budget that was set to at least twice what a step has: no update is faster for it."""
    asked, share = config.batching.tokens_per_microbatch, -(-cut.sequences // lanes) * cut.fed_tokens
    if config.batching.sets("tokens_per_microbatch") and isinstance(asked, int) and asked >= 2 * share:
        yield (
            f"batching.tokens_per_microbatch = {asked:,} is more than the {share:,} tokens of a step for each rank: "
            "every update is one micro-batch, and the memory is counted for its tokens"
        )


def mesh_errors(algorithm: AlgorithmConfig, stack: StackConfig) -> list[str]:
    """Refuse attention heads that the ranks on one row cannot share evenly, for each gang that the run needs."""
    beside = algorithm.gangs_beside_the_policy if isinstance(algorithm, PolicyConfig) else ()
    errors = []
    for role in (role for role in (POLICY, *beside) if role in roles_of(stack)):
        width = gang_of(stack, role).sequence_parallel
        heads = ModelFacts.read(model_folder(model_of(stack, role))).heads if width > 1 else 0
        if heads % width:
            errors.append(
                f"{section_of(role)}.sequence_parallel is {width}, but the model has {heads} attention heads "
                f"= {heads // width} x {width} + {heads % width}: each rank takes as many as the others"
            )
    return errors


def _optimizer_steps(config: RunConfig) -> str:
    """Say how the groups of a step become optimizer steps."""
    optimizer, groups = config.optimizer, config.rollout.prompts_per_step
    parts = optimizer.steps_per_update
    once = (
        f"1 optimizer step on all {groups} groups"
        if parts == 1
        else f"{parts} mini-batches of {groups} groups"
    )
    passes = optimizer.epochs_per_update
    return once if passes == 1 else f"{once}, {passes} passes"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def mesh_line(trainer: TrainerConfig) -> Line:
    """Describe the copies of the weights, and the ranks that work on a micro-batch."""
    shards, width = trainer.nproc // trainer.replicate, trainer.sequence_parallel
    each = " each" if trainer.replicate > 1 else ""
    parts = f"each micro-batch on {width} ranks" if width > 1 else "each rank with micro-batches of its own"
    compiled = {"auto": "compiled where there are GPUs", "on": "compiled", "off": "not compiled"}
    return (
        "trainer",
        _counted(trainer.nproc, "rank", "ranks"),
        f"{_counted(trainer.replicate, 'copy', 'copies')} on {_counted(shards, 'rank', 'ranks')}{each}; {parts}; "
        f"layers {compiled[trainer.compile]}",
    )


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
    return "KV cache at a sync", policy, explanation


def quantization_lines(stack: StackConfig) -> list[Line]:
    """Say what decoding with quantized matrices brings and costs."""
    if (quantization := stack.generator.quantization) is None:
        return []
    bound = EXPLAINED_BY_ROUNDING[quantization].warn_at
    return [
        (
            "rollout precision",
            quantization,
            "matrices of 8 bits, made of each version at its commit, which loads the whole model anew; trainer and "
            f"generator may differ by {bound:g} on the mean, which algorithm.correction corrects",
        )
    ]


def quantization_errors(config: RunConfig, stack: StackConfig) -> list[str]:
    """Refuse to train quantized samples as if the trainer's own policy had written them."""
    quantization = stack.generator.quantization
    if quantization is None or not isinstance(config.algorithm, PolicyConfig):
        return []
    if not _trusts_old_samples(config.algorithm):
        return []
    return [
        f"generator.quantization is {quantization}, so samples come from another policy than the one that is trained, "
        f"and nothing in {config.algorithm.type} as it is set corrects that: set algorithm.correction.importance to "
        "token"
    ]


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
    left_out = correction.rejection or (correction.sequence_low, correction.sequence_high) != (None, None)
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
