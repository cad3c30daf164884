"""Describes how the samples of a step become updates: micro-batches, optimizer steps, and the ranks that share them.

Invariants: the way an update is cut never changes its result, so none is refused. The number of micro-batches holds for
padded and for packed rows: it is exact when all sequences are as long as the longest, and shorter ones never need more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flotilla_coordinator.plan.lines import Line
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.trainers.spec import critic_warmup_steps
from flotilla_core.config import AlgorithmConfig, PolicyConfig, RunConfig, StackConfig, TrainerConfig
from flotilla_core.gangs import gang_of, model_of, roles_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import POLICY, section_of


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
    optimizer, budget = config.optimizer, config.batching.tokens_per_microbatch
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
    budget = config.batching.tokens_per_microbatch
    if cut.fed_tokens > budget:
        yield (
            f"a sequence may have {longest} tokens, more than batching.tokens_per_microbatch = "
            f"{budget}: such a one is a micro-batch of its own"
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
