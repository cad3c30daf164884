"""The run's configuration as the gangs want to hear it: sessions, with the sections of the run as they stand there.

Invariant: a section travels whole, so that what the trainer reads is what the run resolved, presets and all.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import struct_pb2

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import ConfigModel, CriticConfig, PolicyConfig, RunConfig
from flotilla_core.roles import REFERENCE, TEACHER, kind_of_role

FROZEN_ROLES = {REFERENCE: pb.ROLE_REFERENCE, TEACHER: pb.ROLE_TEACHER}

OBJECTIVES = {"sft": "sft", "dpo": "preference", "reward_model": "reward_model"}
"""Kinds of objectives by `algorithm.type`; every other type is a policy's."""


def session_spec(config: RunConfig, dump_dir: Path) -> pb.SessionSpec:
    """Everything that a policy session needs to know about a run."""
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
    """The same for the critic's session; without weights or a model of its own it starts as the policy does."""
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
    """The same for a role that only scores."""
    return pb.SessionSpec(
        role=role, initial_weights=initial_weights, batching=_struct(config.batching), seed=config.seed
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


def objective(config: RunConfig) -> pb.Objective:
    """Supervised, of preferences, of a reward model, or a policy's, with every section resolved."""
    algorithm, sampling = config.algorithm, config.rollout.sampling
    if not isinstance(algorithm, PolicyConfig):
        return pb.Objective(kind=OBJECTIVES[algorithm.type], section=_struct(algorithm))
    # The trainer knows nothing of the rewards of a run: what stands for all of them is written out.
    if algorithm.advantage.type == "gdpo" and not algorithm.advantage.arguments["weights"]:
        own = algorithm.advantage.model_copy(update={"weights": tuple(t.weight for t in config.rewards)})
        algorithm = algorithm.model_copy(update={"advantage": own})
    return pb.Objective(
        kind="policy",
        section=_struct(algorithm),
        temperature=sampling.temperature,
        max_response_tokens=sampling.max_response_tokens,
    )


def value_objective(config: RunConfig) -> pb.Objective:
    """Say what the critic of a policy objective learns; its section has the `critic` of the run in it."""
    made = objective(config)
    made.kind = "value"
    return made


def _struct(section: ConfigModel) -> struct_pb2.Struct:
    """A section as the trainer reads it: every key of it, because what is left out would come from a preset."""
    struct = struct_pb2.Struct()
    struct.update(section.model_dump(mode="json"))
    return struct
