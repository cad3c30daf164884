"""The run's configuration as the gangs want to hear it."""

from __future__ import annotations

from pathlib import Path

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_coordinator.runs.objective import objective, value_objective
from flotilla_core.config import CriticConfig, OptimizerConfig, PolicyConfig, RunConfig

SCHEDULES = {
    "constant": pb.SCHEDULE_CONSTANT,
    "linear": pb.SCHEDULE_LINEAR,
    "cosine": pb.SCHEDULE_COSINE,
}

PACKINGS = {"auto": pb.PACKING_UNSPECIFIED, "on": pb.PACKING_ON, "off": pb.PACKING_OFF}


def session_spec(config: RunConfig, dump_dir: Path) -> pb.SessionSpec:
    """Everything that a policy session needs to know about a run."""
    return pb.SessionSpec(
        role=pb.ROLE_POLICY,
        initial_weights=str(config.initial_weights or ""),
        objective=objective(config),
        optimizer=_optimizer(config.optimizer),
        batching=_batching(config),
        seed=config.seed,
        total_updates=max(1, config.steps - critic_warmup_steps(config)),
        max_skipped_updates=config.optimizer.max_skipped_updates,
        dump_dir=str(dump_dir),
    )


def critic_spec(config: RunConfig, critic: CriticConfig, dump_dir: Path) -> pb.SessionSpec:
    """The same for the critic's session."""
    return pb.SessionSpec(
        role=pb.ROLE_CRITIC,
        initial_weights=str(critic.initial_weights or ""),
        objective=value_objective(config, critic),
        optimizer=_optimizer(critic.optimizer),
        batching=_batching(config),
        seed=config.seed,
        total_updates=config.steps,
        max_skipped_updates=critic.optimizer.max_skipped_updates,
        dump_dir=str(dump_dir),
    )


def frozen_spec(config: RunConfig, role: pb.Role.ValueType, initial_weights: str) -> pb.SessionSpec:
    """The same for a role that only scores."""
    return pb.SessionSpec(
        role=role, initial_weights=initial_weights, batching=_batching(config), seed=config.seed
    )


def critic_warmup_steps(config: RunConfig) -> int:
    """First steps in which the policy does not learn."""
    algorithm = config.algorithm
    return algorithm.critic.warmup_steps if isinstance(algorithm, PolicyConfig) and algorithm.critic else 0


def _optimizer(section: OptimizerConfig) -> pb.Optimizer:
    return pb.Optimizer(
        learning_rate=section.learning_rate,
        beta1=section.betas[0],
        beta2=section.betas[1],
        epsilon=section.epsilon,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        schedule=SCHEDULES[section.schedule],
        warmup_updates=section.warmup_updates,
        final_lr_ratio=section.final_lr_ratio,
        offload=section.offload,
    )


def _batching(config: RunConfig) -> pb.Batching:
    batching = config.batching
    return pb.Batching(
        tokens_per_microbatch=batching.tokens_per_microbatch,
        logprob_chunk_tokens=batching.logprob_chunk_tokens,
        packing=PACKINGS[batching.packing],
        activation_checkpointing=batching.activation_checkpointing,
    )
