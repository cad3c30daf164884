"""The run's configuration as the gangs want to hear it."""

from __future__ import annotations

from pathlib import Path

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_coordinator.gangs.objective import objective, value_objective
from flotilla_core.config import CriticConfig, LoraConfig, OptimizerConfig, PolicyConfig, RunConfig
from flotilla_core.roles import REFERENCE, TEACHER, kind_of_role

SCHEDULES = {
    "constant": pb.SCHEDULE_CONSTANT,
    "linear": pb.SCHEDULE_LINEAR,
    "cosine": pb.SCHEDULE_COSINE,
}

PACKINGS = {"auto": pb.PACKING_UNSPECIFIED, "on": pb.PACKING_ON, "off": pb.PACKING_OFF}

FROZEN_ROLES = {REFERENCE: pb.ROLE_REFERENCE, TEACHER: pb.ROLE_TEACHER}


def session_spec(config: RunConfig, dump_dir: Path) -> pb.SessionSpec:
    """Everything that a policy session needs to know about a run."""
    return pb.SessionSpec(
        role=pb.ROLE_POLICY,
        initial_weights=str(config.initial_weights or ""),
        objective=objective(config),
        optimizer=_optimizer(config.optimizer),
        batching=_batching(config),
        seed=config.seed,
        total_updates=policy_updates(config),
        max_skipped_updates=config.optimizer.max_skipped_updates,
        dump_dir=str(dump_dir),
        lora=None if config.lora is None else _lora(config.lora),
    )


def critic_spec(
    config: RunConfig, critic: CriticConfig, dump_dir: Path, *, has_own_model: bool
) -> pb.SessionSpec:
    """The same for the critic's session; without weights or a model of its own it starts as the policy does."""
    start = critic.initial_weights or (None if has_own_model else config.initial_weights)
    return pb.SessionSpec(
        role=pb.ROLE_CRITIC,
        initial_weights=str(start or ""),
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


def critic_of(config: RunConfig) -> CriticConfig | None:
    """The section of the critic, where the run has one."""
    return config.algorithm.critic if isinstance(config.algorithm, PolicyConfig) else None


def frozen_roles_of(config: RunConfig) -> list[str]:
    """The roles of gangs that only score for the run."""
    algorithm = config.algorithm
    wanted = algorithm.gangs_beside_the_policy if isinstance(algorithm, PolicyConfig) else []
    return [role for role in wanted if kind_of_role(role) in FROZEN_ROLES]


def critic_needs_start(config: RunConfig) -> bool:
    """Whether returns have a divergence in them from a first policy that the policy's own ranks hold."""
    if not isinstance(config.algorithm, PolicyConfig) or config.algorithm.critic is None:
        return False
    return config.algorithm.kl.placement == "reward" and config.algorithm.kl.reference == "frozen"


def policy_updates(config: RunConfig) -> int:
    """Updates of the policy in the whole run: what its schedule is spread over."""
    return max(1, config.steps - critic_warmup_steps(config))


def critic_warmup_steps(config: RunConfig) -> int:
    """First steps in which the policy does not learn."""
    critic = critic_of(config)
    return 0 if critic is None else critic.warmup_steps


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
        steps_per_update=section.steps_per_update,
        epochs_per_update=section.epochs_per_update,
    )


def _batching(config: RunConfig) -> pb.Batching:
    batching = config.batching
    return pb.Batching(
        tokens_per_microbatch=batching.tokens_per_microbatch,
        logprob_chunk_tokens=batching.logprob_chunk_tokens,
        packing=PACKINGS[batching.packing],
        activation_checkpointing=batching.activation_checkpointing,
        activation_offload=batching.activation_offload,
    )


def _lora(lora: LoraConfig) -> pb.Lora:
    targets = () if lora.targets == "all-linear" else lora.targets
    return pb.Lora(rank=lora.rank, alpha=lora.alpha, targets=targets, adapter=str(lora.adapter or ""))
