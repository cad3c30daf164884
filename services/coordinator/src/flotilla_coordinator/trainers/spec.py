"""Writes the specifications of a run's sessions on trainer gangs.

Invariant: a section travels whole, so the trainer reads what the run resolved, with all presets applied.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import struct_pb2

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import ConfigModel, CriticConfig, PolicyConfig, RunConfig
from flotilla_core.roles import REFERENCE, REWARD_MODEL, TEACHER, kind_of_role

FROZEN_ROLES = {
    REFERENCE: pb.ROLE_REFERENCE,
    TEACHER: pb.ROLE_TEACHER,
    REWARD_MODEL: pb.ROLE_REWARD_MODEL,
}

OBJECTIVES = {"sft": "sft", "dpo": "preference", "reward_model": "reward_model"}
"""Kinds of objectives by `algorithm.type`; every other type is a policy's."""


def session_spec(config: RunConfig, dump_dir: Path) -> pb.SessionSpec:
    """Return the specification of the policy's session."""
    return pb.SessionSpec(
        role=pb.ROLE_POLICY,
        initial_weights=str(config.initial_weights or ""),
        objective=objective(config),
        optimizer=_struct(config.optimizer),
        batching=_struct(config.batching),
        seed=config.seed,
        total_updates=policy_updates(config),
        dump_dir=str(dump_dir),
        lora=None if config.lora is None else _struct(config.lora),
    )


def critic_spec(
    config: RunConfig, critic: CriticConfig, dump_dir: Path, *, has_own_model: bool
) -> pb.SessionSpec:
    """Return that of the critic's session; without weights or a model of its own it starts as the policy does."""
    start = critic.initial_weights or (None if has_own_model else config.initial_weights)
    return pb.SessionSpec(
        role=pb.ROLE_CRITIC,
        initial_weights=str(start or ""),
        objective=value_objective(config),
        optimizer=_struct(critic.optimizer),
        batching=_struct(config.batching),
        seed=config.seed,
        total_updates=config.steps,
        dump_dir=str(dump_dir),
    )


def frozen_spec(config: RunConfig, role: pb.Role.ValueType, initial_weights: str) -> pb.SessionSpec:
    """Return that of the session of a role that only scores."""
    return pb.SessionSpec(
        role=role, initial_weights=initial_weights, batching=_struct(config.batching), seed=config.seed
    )


def critic_of(config: RunConfig) -> CriticConfig | None:
    """Return the section of the critic; None where the run has none."""
    return config.algorithm.critic if isinstance(config.algorithm, PolicyConfig) else None


def frozen_roles_of(config: RunConfig) -> list[str]:
    """List the roles of gangs that only score for the run."""
    return [role for role in config.gangs_beside_the_policy if kind_of_role(role) in FROZEN_ROLES]


def critic_needs_start(config: RunConfig) -> bool:
    """Return whether returns contain a divergence from an initial policy that the policy's own ranks hold."""
    if not isinstance(config.algorithm, PolicyConfig) or config.algorithm.critic is None:
        return False
    return config.algorithm.kl.placement == "reward" and config.algorithm.kl.reference == "frozen"


def policy_updates(config: RunConfig) -> int:
    """Count the updates of the policy in the whole run, over which its schedule is spread."""
    return max(1, config.steps - critic_warmup_steps(config))


def critic_warmup_steps(config: RunConfig) -> int:
    """Count the first steps, in which the policy does not learn."""
    critic = critic_of(config)
    return 0 if critic is None else critic.warmup_steps


def objective(config: RunConfig) -> pb.Objective:
    """Return the objective of a run's policy: supervised, of preferences, of a reward model, or of rollouts."""
    algorithm, sampling = config.algorithm, config.rollout.sampling
    if not isinstance(algorithm, PolicyConfig):
        return pb.Objective(kind=OBJECTIVES[algorithm.type], section=_struct(algorithm))
    # The trainer does not see the run's rewards, so weights that are left out are written out for it.
    if algorithm.advantage.type == "gdpo" and not algorithm.advantage.arguments["weights"]:
        own = algorithm.advantage.model_copy(update={"weights": tuple(t.weight for t in config.rewards)})
        algorithm = algorithm.model_copy(update={"advantage": own})
    return pb.Objective(
        kind="policy",
        section=_struct(algorithm),
        temperature=sampling.temperature,
        max_response_tokens=config.most_sample_tokens,
    )


def value_objective(config: RunConfig) -> pb.Objective:
    """Return the objective of the run's critic; its section contains the run's `critic`."""
    made = objective(config)
    made.kind = "value"
    return made


def _struct(section: ConfigModel) -> struct_pb2.Struct:
    """Write every key of a section, because the trainer would fill what is left out from a preset."""
    struct = struct_pb2.Struct()
    struct.update(section.model_dump(mode="json"))
    return struct
