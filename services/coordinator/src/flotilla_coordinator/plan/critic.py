"""What `run plan` says of a critic: how it learns, what it starts from, what its ranks need."""

from __future__ import annotations

from collections.abc import Iterator

from flotilla_coordinator.gangs.session_spec import critic_of
from flotilla_coordinator.plan.algorithm import Line
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.sizes import shown_bytes
from flotilla_coordinator.plan.trainer_memory import TrainerMemory
from flotilla_core.config import CriticConfig, RunConfig, StackConfig
from flotilla_core.gangs import model_of
from flotilla_core.model_folder import model_folder
from flotilla_core.roles import CRITIC


def critic_parameters(config: RunConfig, stack: StackConfig) -> int:
    """Those of the critic of a run; 0 for a run without one."""
    return 0 if critic_of(config) is None else _model(stack).parameters


def critic_lines(config: RunConfig, stack: StackConfig, longest_sequence: int) -> Iterator[Line]:
    """None for a run without one."""
    critic = critic_of(config)
    if critic is None:
        return
    clip = "no clip" if critic.value_clip is None else f"values clipped at {critic.value_clip:g}"
    alone = f"; the first {critic.warmup_steps} steps teach it alone" if critic.warmup_steps else ""
    yield (
        "critic",
        f"learning rate {critic.optimizer.learning_rate:g}",
        f"{critic.optimizer.schedule}, {clip}; starts from {_start(config, critic, stack)}{alone}",
    )
    need = TrainerMemory.of_critic(_model(stack), config, critic, stack.critic, longest_sequence)
    yield (
        "memory of a critic rank",
        f"about {shown_bytes(need.total)}",
        f"weights {shown_bytes(need.masters)}, gradients {shown_bytes(need.gradients)}, "
        f"AdamW {shown_bytes(need.moments)}, gathered {stack.critic.dtype} layers {shown_bytes(need.gathered)}, "
        f"activations {shown_bytes(need.activations)}; it has no logits",
    )


def _model(stack: StackConfig) -> ModelFacts:
    return ModelFacts.read(model_folder(model_of(stack, CRITIC))).with_value_head()


def _start(config: RunConfig, critic: CriticConfig, stack: StackConfig) -> str:
    if critic.initial_weights is not None:
        return str(critic.initial_weights)
    if stack.critic.model is not None:
        return f"{stack.critic.model} (stack: critic.model)"
    return f"the policy's weights, {config.initial_weights or stack.model}"
