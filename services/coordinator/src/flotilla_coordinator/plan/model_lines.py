"""Describes the models of a run as lines of its plan: trained model, starting weights, critic, and what a sync sends.

Invariant: a generator's worker holds live and staged weights at the same time. With adapters only the adapters are
sent, after the weights under them were sent once to each weight group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flotilla_coordinator.plan.lines import STARTING_WEIGHTS, Line, shown_bytes
from flotilla_coordinator.plan.model_facts import AdapterFacts, ModelFacts
from flotilla_coordinator.plan.trainer_memory import BYTES, MASTER, TrainerMemory
from flotilla_coordinator.trainers.spec import critic_of
from flotilla_core.config import CriticConfig, RunConfig, StackConfig
from flotilla_core.gangs import model_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import CRITIC


def model_lines(
    config: RunConfig, model: ModelFacts, adapters: AdapterFacts | None, longest: int
) -> Iterator[Line]:
    """Describe the model, its starting weights and its adapters; a sequence may have up to `longest` tokens."""
    yield (
        "model",
        _count(model.parameters, "parameters"),
        f"{model.layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocabulary_size}, "
        f"sequences up to {longest} tokens",
    )
    if config.initial_weights:
        yield STARTING_WEIGHTS, str(config.initial_weights), "initial_weights"
    else:
        how = "the stack's model as it is; initial_weights starts from others"
        yield STARTING_WEIGHTS, str(model.folder), how
    lora = config.lora
    if lora is not None and adapters is not None:
        yield (
            "trainable",
            _count(adapters.parameters, "parameters"),
            f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {adapters.layers} linear layers "
            f"({', '.join(adapters.names)}): {adapters.parameters / model.parameters:.2%} of the model's"
            + (f"; from {lora.adapter}" if lora.adapter else ""),
        )


def _count(number: int, what: str) -> str:
    for size, unit in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if number >= size:
            return f"{number / size:.3g}{unit} {what}"
    return f"{number} {what}"


def critic_parameters(config: RunConfig, stack: StackConfig) -> int:
    """Return the parameters of a run's critic, and 0 for a run without one."""
    return 0 if critic_of(config) is None else _critic_model(stack).parameters


def critic_lines(config: RunConfig, stack: StackConfig, longest_sequence: int) -> Iterator[Line]:
    """Describe the critic; a run without one has no such line."""
    critic = critic_of(config)
    if critic is None:
        return
    clip = "no clip" if critic.value_clip is None else f"values clipped at {critic.value_clip:g}"
    alone = f"; the first {critic.warmup_steps} steps teach it alone" if critic.warmup_steps else ""
    yield (
        "critic",
        f"learning rate {critic.optimizer.learning_rate:g}",
        f"{critic.optimizer.schedule}, {clip}; starts from {_critic_start(config, critic, stack)}{alone}",
    )
    need = TrainerMemory.of_critic(_critic_model(stack), config, critic, stack.critic, longest_sequence)
    yield (
        "memory of a critic rank",
        f"about {shown_bytes(need.total)}",
        f"weights {shown_bytes(need.masters)}, gradients {shown_bytes(need.gradients)}, "
        f"AdamW {shown_bytes(need.moments)}, gathered {stack.critic.dtype} layers {shown_bytes(need.gathered)}, "
        f"activations {shown_bytes(need.activations)}; it has no logits",
    )


def _critic_model(stack: StackConfig) -> ModelFacts:
    return ModelFacts.read(model_folder(model_of(stack, CRITIC))).with_value_head()


def _critic_start(config: RunConfig, critic: CriticConfig, stack: StackConfig) -> str:
    if critic.initial_weights is not None:
        return str(critic.initial_weights)
    if stack.critic.model is not None:
        return f"{stack.critic.model} (stack: critic.model)"
    return f"the policy's weights, {config.initial_weights or stack.model}"


def sync_lines(
    config: RunConfig, stack: StackConfig, model: ModelFacts, adapters: AdapterFacts | None
) -> Iterator[Line]:
    """Describe the memory of a generator's worker, then the bytes and broadcasts of a sync."""
    generator = stack.generator
    weights = model.parameters * BYTES[generator.dtype] // generator.tensor_parallel_size
    token = model.layers * model.key_value_size * BYTES[generator.dtype] // generator.tensor_parallel_size
    sent = model.parameters * BYTES[stack.trainer.dtype]
    staged = f"live and staged {generator.dtype} weights {shown_bytes(weights)} each"
    if adapters is not None:
        staged = f"live {generator.dtype} weights, and {shown_bytes(sent)} of the host for those under the adapters"
    yield (
        "memory of a generator worker",
        f"about {shown_bytes(weights if adapters else 2 * weights)} + KV cache",
        f"{staged}; the KV cache takes {shown_bytes(token)} a token",
    )
    bucket = config.weights.bucket_mib
    moved = sent if adapters is None else adapters.parameters * MASTER
    once = "" if adapters is None else f"; {shown_bytes(sent)} before the first ones of each weight group"
    yield (
        "weight sync",
        shown_bytes(moved),
        f"in about {math.ceil(moved / (bucket << 20))} broadcast(s) of at most {bucket} MiB "
        f"to each generator{once}",
    )
