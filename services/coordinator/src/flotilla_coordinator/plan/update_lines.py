"""How the samples of a step become updates of the weights.

Invariant: how an update is cut never changes its result, so nothing in here is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from flotilla_coordinator.gangs.session_spec import critic_warmup_steps
from flotilla_coordinator.plan.algorithm import Line
from flotilla_coordinator.plan.micro_batches import MicroBatches
from flotilla_core.config import RunConfig


def update_lines(config: RunConfig, cut: MicroBatches, samples: int, lanes: int) -> Iterator[Line]:
    """Updates, their optimizer steps and micro-batches, the learning rate."""
    optimizer, budget = config.optimizer, config.batching.tokens_per_microbatch
    alone = critic_warmup_steps(config)
    updates = config.steps - alone
    after = f" after the {alone} in which only the critic learns" if alone else ""
    yield "updates", f"{updates}", f"one a step{after}, over all of its samples"
    yield (
        "optimizer steps",
        f"{optimizer.steps_of_an_update} an update",
        f"{optimizer.steps_per_update} mini-batch(es) of whole groups, {config.rollout.prompts_per_step} groups "
        f"together, x {optimizer.epochs_per_update} pass(es); {updates * optimizer.steps_of_an_update:,} in the run",
    )
    yield (
        "micro-batches of an update",
        f"at most {cut.per_rank} a rank",
        f"{samples} sequences over {lanes} lane(s) of ranks, {cut.together} together within "
        f"tokens_per_microbatch = {budget} when each feeds {cut.fed_tokens} tokens; never changes the result",
    )
    end = optimizer.learning_rate * (1.0 if optimizer.schedule == "constant" else optimizer.final_lr_ratio)
    yield (
        "learning rate",
        f"{optimizer.learning_rate:g}",
        f"{optimizer.warmup_updates} updates of warm-up, then {optimizer.schedule} to {end:g} at update {updates}",
    )


def update_warnings(config: RunConfig, cut: MicroBatches, longest: int) -> Iterator[str]:
    """A sequence that is a micro-batch of its own; the longest one has so many tokens."""
    budget = config.batching.tokens_per_microbatch
    if cut.fed_tokens > budget:
        yield (
            f"a sequence may have {longest} tokens, more than batching.tokens_per_microbatch = "
            f"{budget}: such a one is a micro-batch of its own"
        )
