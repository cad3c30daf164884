"""Chooses what `batching` leaves open: the tokens of a micro-batch, and whether layers compute their activations again.

Invariants: what a user set is never changed; the first choice that fits the memory of a GPU is taken, larger
micro-batches before smaller ones, and kept activations before any that are computed again; a choice never changes a
result. With `trainer.cpu_offload` one beside which weights and gradients stay whole through an update comes first: to
move them in every micro-batch takes longer than to compute activations again. Where the GPU is not known, as with a
trainer that was started elsewhere, or on a CPU, the choice is that of the trainer itself: small micro-batches, nothing
computed again. All gangs of a run have the policy's choice.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.plan.chapter import Line, shown_bytes
from flotilla_coordinator.plan.gpu_memory import compiles, gpu_of_this_host, rank_room
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.run_facts import longest_sequence
from flotilla_coordinator.plan.trainer_memory import TrainerMemory, kept_bytes, offloads
from flotilla_core.config import BatchingConfig, RunConfig, StackConfig
from flotilla_core.config.training import UNCHOSEN_MICROBATCH_TOKENS
from flotilla_core.model_folder import model_folder

Recompute = Literal["selective"] | bool

CHOICES: tuple[tuple[int, Recompute], ...] = (
    (32_768, False),
    (16_384, False),
    (8192, False),
    (16_384, "selective"),
    (8192, "selective"),
    (8192, True),
    (4096, True),
)
"""Tokens, and `activation_checkpointing`; below 8,192 tokens a GPU has too little work at a time."""
COMPUTED_AGAIN: dict[Recompute, str] = {
    False: "keep their activations",
    "selective": "compute the wide parts again",
    True: "compute their activations again",
}


def batching_of_run(config: RunConfig, stack: StackConfig, data: PromptFile) -> BatchingConfig:
    """Return the section `batching` as the plan of this run has it."""
    gpu = gpu_of_this_host()
    model = ModelFacts.read(model_folder(stack.model))
    if config.trains_reward_model:
        model = model.with_value_head()
    # Lengths of given answers take time, and only a GPU's memory makes them matter.
    longest = 1 if gpu is None else longest_sequence(config, data)
    return chosen_batching(config, stack, model, longest, gpu)


def chosen_batching(
    config: RunConfig, stack: StackConfig, model: ModelFacts, longest: int, gpu: int | None
) -> BatchingConfig:
    """Return the section `batching` with nothing left open, for sequences of up to `longest` tokens."""
    known = gpu is not None and stack.trainer.attach is None and stack.trainer.backend != "gloo"
    if gpu is None or not known:
        return _settled(config.batching, UNCHOSEN_MICROBATCH_TOKENS, recompute=False)
    room = rank_room(config, model, stack, gpu)
    chosen = config.batching
    rooms = [room - kept_bytes(model, config, stack.trainer), room] if offloads(stack.trainer) else [room]
    for left, (tokens, recompute) in product(rooms, CHOICES):
        chosen = _settled(config.batching, tokens, recompute=recompute)
        tried = config.model_copy(update={"batching": chosen})
        need = TrainerMemory.of(model, tried, stack.trainer, longest, compiled=compiles(stack.trainer, gpu))
        if need.total <= left:
            break
    return chosen


def batching_line(asked: BatchingConfig, chosen: BatchingConfig, gpu: int) -> Line:
    """Say what was chosen, and for which GPU."""
    assert chosen.activation_checkpointing != "auto"
    layers = COMPUTED_AGAIN[chosen.activation_checkpointing]
    return Line(
        "micro-batch",
        f"{chosen.microbatch_budget:,} tokens",
        f"{'set' if asked == chosen else 'chosen'} for a GPU of {shown_bytes(gpu)}; layers {layers}",
    )


def _settled(asked: BatchingConfig, tokens: int, *, recompute: Recompute) -> BatchingConfig:
    """Return the section with these values where it leaves them open."""
    update: dict[str, Any] = {}
    if asked.tokens_per_microbatch == "auto":
        update["tokens_per_microbatch"] = tokens
    if asked.activation_checkpointing == "auto":
        update["activation_checkpointing"] = recompute
    # A copy would count these as set by the user, who left them open, also where a file says `auto`.
    return BatchingConfig.model_construct(asked.model_fields_set - update.keys(), **(dict(asked) | update))
