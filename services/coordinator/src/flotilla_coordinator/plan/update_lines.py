"""Describes what is optimised, and how the samples of a step become an update, as lines of a run's plan.

Invariants: the way an update is cut never changes its result, so none is refused. The number of micro-batches holds for
padded and for packed rows: it is exact when all sequences are as long as the longest, and shorter ones never need more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flotilla_coordinator.plan.chapter import Entries, Line, refusal
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.run_facts import RunFacts
from flotilla_coordinator.trainers.spec import critic_warmup_steps
from flotilla_core.config import (
    AlgorithmConfig,
    DpoConfig,
    PolicyConfig,
    RewardModelConfig,
    RunConfig,
    StackConfig,
)
from flotilla_core.config.algorithm import CorrectionConfig, RejectionConfig
from flotilla_core.config.losses import GspoLoss
from flotilla_core.config.training import TeacherConfig
from flotilla_core.findings import warning
from flotilla_core.gangs import gang_of, model_of, roles_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import POLICY, section_of


def algorithm_chapter(of: AlgorithmConfig) -> Entries:
    """Describe each section of the algorithm in one line; a section that is off has none."""
    if isinstance(of, PolicyConfig):
        yield from _policy(of)
    elif isinstance(of, RewardModelConfig):
        center = of.center_coefficient
        centred = f"; {center:g} x the squared sum of both rewards keeps them around zero" if center else ""
        yield Line(
            "algorithm",
            of.type,
            f"a head of one number learns by pairs to give the preferred answer the higher one{centred}",
        )
    elif isinstance(of, DpoConfig):
        reference = "nothing" if of.reference_free else "the first policy"
        shown = _settings({"beta": of.beta, "label_smoothing": of.label_smoothing or None})
        yield Line("algorithm", of.type, f"{of.loss} of pairs, compared with {reference}; {shown}")
    else:
        yield Line("algorithm", of.type, "cross-entropy of the answers, mean over all tokens of the update")


def _policy(algorithm: PolicyConfig) -> Entries:
    advantage, loss, kl, correction = algorithm.advantage, algorithm.loss, algorithm.kl, algorithm.correction
    control = ", control: rewards are shuffled" if algorithm.shuffle_rewards else ""
    yield Line("algorithm", algorithm.type, f"a preset; docs/algorithms.md has the formulas{control}")
    named = {*advantage.arguments, "type", "parameters"}
    switched_on = {key: value for key, value in advantage if value and key not in named}
    yield Line("advantage", advantage.type, _settings(advantage.arguments | switched_on))
    bonuses = {key: value for key, value in algorithm if value and isinstance(value, float)}
    yield Line("loss", loss.type, _settings(loss.arguments | bonuses))
    constant = algorithm.aggregation.constant_tokens or "rollout.sampling.max_response_tokens"
    yield Line(
        "aggregation",
        algorithm.aggregation.type,
        f"over {constant}" if algorithm.aggregation.type == "constant" else "counted over the whole update",
    )
    usual = CorrectionConfig()
    if changed := {key: value for key, value in correction if value != getattr(usual, key)}:
        yield Line("correction", correction.importance, _settings(changed))
    if isinstance(loss, GspoLoss) and correction.proximal == "rollout":
        yield warning(
            "algorithm.loss gspo clips ratios beyond "
            f"1 - {loss.clip_low:g} and 1 + {loss.clip_high:g}, and with "
            "algorithm.correction.proximal rollout they hold what generator and trainer compute differently, which is "
            "more than that on most GPUs: set it to trainer"
        )
    if kl.placement != "none":
        adaptive = "" if kl.target is None else f", adapts to {kl.target:g} a token"
        yield Line(
            "divergence",
            f"in the {kl.placement}",
            f"{kl.estimator} from the first policy, coefficient {kl.coefficient:g}{adaptive}",
        )
    if kl.placement == "loss" and kl.estimator == "k1":
        yield warning(
            "algorithm.kl.estimator k1 with algorithm.kl.placement loss adds noise and holds nothing back, for the "
            "gradient of log p - log q is that of log p, which is zero on average: set the estimator to k2, k3 or "
            "full, or the placement to reward"
        )
    if algorithm.teacher is not None:
        yield _taught(algorithm.teacher)


def _taught(teacher: TeacherConfig) -> Line:
    others = ", all others as one more" if teacher.tail else ""
    by = "" if teacher.teacher_field is None else f" by {teacher.teacher_field}"
    asked = f"; asked: {' and '.join(teacher.teachers)}{by}" if teacher.teachers else ""
    return Line(
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


def update_chapter(run: RunFacts) -> Entries:
    """Describe the updates, their optimizer steps and micro-batches, and the learning rate."""
    config, optimizer, lanes = run.config, run.config.optimizer, run.stack.trainer.lanes
    budget, alone = config.batching.microbatch_budget, critic_warmup_steps(config)
    # A reward is read off after the last token, so that token is fed as well.
    longest = run.longest + (1 if config.trains_reward_model else 0)
    cut = MicroBatches.of(run.samples, longest, budget, lanes)
    updates = config.steps - alone
    after = f" after the {alone} in which only the critic learns" if alone else ""
    yield Line("updates", f"{updates}", f"one a step{after}, over all of its samples")
    yield Line(
        "optimizer steps",
        f"{optimizer.steps_of_an_update} an update",
        f"{_optimizer_steps(config)}; {updates * optimizer.steps_of_an_update:,} in the run",
    )
    yield Line(
        "micro-batches of an update",
        f"at most {cut.per_rank} a rank",
        f"{run.samples} sequences over {_counted(lanes, 'rank group', 'rank groups')}; up to {cut.together} sequences "
        f"per micro-batch: tokens_per_microbatch = {budget}, {cut.fed_tokens} tokens each; never changes the result",
    )
    end = optimizer.learning_rate * (1.0 if optimizer.schedule == "constant" else optimizer.final_lr_ratio)
    yield Line(
        "learning rate",
        f"{optimizer.learning_rate:g}",
        f"{optimizer.warmup_updates} updates of warm-up, then {optimizer.schedule} to {end:g} at update {updates}",
    )
    if cut.fed_tokens > budget:
        yield warning(
            f"a sequence may have {run.longest} tokens, more than batching.tokens_per_microbatch = "
            f"{budget}: such a one is a micro-batch of its own"
        )
    yield from spare_budget_warnings(config, cut, lanes)


def spare_budget_warnings(config: RunConfig, cut: MicroBatches, lanes: int) -> Entries:
    """Warn of a budget that was set to at least twice what a step has: no update is faster for it."""
    asked, share = config.batching.tokens_per_microbatch, -(-cut.sequences // lanes) * cut.fed_tokens
    if config.batching.sets("tokens_per_microbatch") and isinstance(asked, int) and asked >= 2 * share:
        yield warning(
            f"batching.tokens_per_microbatch = {asked:,} is more than the {share:,} tokens of a step for each rank: "
            "every update is one micro-batch, and the memory is counted for its tokens"
        )


def mesh_errors(config: RunConfig, stack: StackConfig) -> Entries:
    """Refuse attention heads that the ranks on one row cannot share evenly, for each gang that the run needs."""
    roles = (POLICY, *config.gangs_beside_the_policy)
    for role in (role for role in roles if role in roles_of(stack)):
        width = gang_of(stack, role).sequence_parallel
        heads = ModelFacts.read(model_folder(model_of(stack, role))).heads if width > 1 else 0
        if heads % width:
            yield refusal(
                f"{section_of(role)}.sequence_parallel is {width}, but the model has {heads} attention heads "
                f"= {heads // width} x {width} + {heads % width}: each rank takes as many as the others"
            )


def mesh_chapter(run: RunFacts) -> Entries:
    """Describe the copies of the weights, and the ranks that work on a micro-batch."""
    trainer = run.stack.trainer
    shards, width = trainer.nproc // trainer.replicate, trainer.sequence_parallel
    each = " each" if trainer.replicate > 1 else ""
    parts = f"each micro-batch on {width} ranks" if width > 1 else "each rank with micro-batches of its own"
    compiled = {"auto": "compiled where there are GPUs", "on": "compiled", "off": "not compiled"}
    yield Line(
        "trainer",
        _counted(trainer.nproc, "rank", "ranks"),
        f"{_counted(trainer.replicate, 'copy', 'copies')} on {_counted(shards, 'rank', 'ranks')}{each}; {parts}; "
        f"layers {compiled[trainer.compile]}",
    )


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
