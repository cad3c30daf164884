"""The run's configuration as the gangs want to hear it: sessions first, then `algorithm` as their objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import struct_pb2

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import (
    CriticConfig,
    DpoConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardModelConfig,
    RunConfig,
)
from flotilla_core.config.advantages import (
    AdvantageConfig,
    AdvantageSection,
    GdpoAdvantage,
    RewardNormalizationConfig,
)
from flotilla_core.config.algorithm import CorrectionConfig, KlConfig
from flotilla_core.config.losses import SampleWeightsConfig
from flotilla_core.config.roles import TeacherConfig
from flotilla_core.roles import REFERENCE, TEACHER, kind_of_role

SCHEDULES = {
    "constant": pb.SCHEDULE_CONSTANT,
    "linear": pb.SCHEDULE_LINEAR,
    "cosine": pb.SCHEDULE_COSINE,
}

PACKINGS = {"auto": pb.PACKING_UNSPECIFIED, "on": pb.PACKING_ON, "off": pb.PACKING_OFF}

FROZEN_ROLES = {REFERENCE: pb.ROLE_REFERENCE, TEACHER: pb.ROLE_TEACHER}

AGGREGATIONS = {
    "token_mean": pb.AGGREGATION_TYPE_TOKEN_MEAN,
    "sequence_mean_of_token_sum": pb.AGGREGATION_TYPE_SEQUENCE_MEAN_OF_TOKEN_SUM,
    "sequence_mean_of_token_mean": pb.AGGREGATION_TYPE_SEQUENCE_MEAN_OF_TOKEN_MEAN,
    "constant": pb.AGGREGATION_TYPE_CONSTANT,
    "token_sum": pb.AGGREGATION_TYPE_TOKEN_SUM,
}
PLACEMENTS = {
    "none": pb.KL_PLACEMENT_UNSPECIFIED,
    "loss": pb.KL_PLACEMENT_LOSS,
    "reward": pb.KL_PLACEMENT_REWARD,
}
ESTIMATORS = {
    "k1": pb.KL_ESTIMATOR_K1,
    "k2": pb.KL_ESTIMATOR_K2,
    "k3": pb.KL_ESTIMATOR_K3,
    "abs": pb.KL_ESTIMATOR_ABS,
    "full": pb.KL_ESTIMATOR_FULL,
}
STATISTICS = {
    "none": pb.REWARD_STATISTICS_UNSPECIFIED,
    "group": pb.REWARD_STATISTICS_GROUP,
    "batch": pb.REWARD_STATISTICS_BATCH,
    "running": pb.REWARD_STATISTICS_RUNNING,
}
REWARD_WEIGHTS = {
    "none": pb.REWARD_WEIGHTS_UNSPECIFIED,
    "pow": pb.REWARD_WEIGHTS_POW,
    "max_min": pb.REWARD_WEIGHTS_MAX_MIN,
    "max_random": pb.REWARD_WEIGHTS_MAX_RANDOM,
}
PREFERENCE_LOSSES = {
    "sigmoid": pb.PREFERENCE_LOSS_SIGMOID,
    "ipo": pb.PREFERENCE_LOSS_IPO,
    "hinge": pb.PREFERENCE_LOSS_HINGE,
}
PROXIMALS = {
    "rollout": pb.PROXIMAL_ROLLOUT,
    "trainer": pb.PROXIMAL_TRAINER,
    "interpolated": pb.PROXIMAL_INTERPOLATED,
}
IMPORTANCE = {
    "none": pb.IMPORTANCE_UNSPECIFIED,
    "token": pb.IMPORTANCE_TOKEN,
    "sequence": pb.IMPORTANCE_SEQUENCE,
    "icepop": pb.IMPORTANCE_ICEPOP,
    "icepop_sequence": pb.IMPORTANCE_ICEPOP_SEQUENCE,
    "segment": pb.IMPORTANCE_SEGMENT,
}
TEACHER_DIVERGENCES = {
    "forward": pb.TEACHER_DIVERGENCE_FORWARD,
    "reverse": pb.TEACHER_DIVERGENCE_REVERSE,
}
MEASURES = {
    "k1": pb.REJECTION_MEASURE_K1,
    "k2": pb.REJECTION_MEASURE_K2,
    "k3": pb.REJECTION_MEASURE_K3,
    "difference": pb.REJECTION_MEASURE_DIFFERENCE,
}
REJECTED = {
    "token": pb.REJECTION_OVER_TOKEN,
    "sequence_sum": pb.REJECTION_OVER_SEQUENCE_SUM,
    "sequence_mean": pb.REJECTION_OVER_SEQUENCE_MEAN,
    "sequence_max": pb.REJECTION_OVER_SEQUENCE_MAX,
}


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


def objective(config: RunConfig) -> pb.Objective:
    """Supervised, of preferences, of a reward model, or a policy objective with every section resolved."""
    algorithm, sampling = config.algorithm, config.rollout.sampling
    if isinstance(algorithm, PolicyConfig):
        if isinstance(algorithm.advantage, GdpoAdvantage) and not algorithm.advantage.weights:
            own = algorithm.advantage.model_copy(update={"weights": tuple(t.weight for t in config.rewards)})
            algorithm = algorithm.model_copy(update={"advantage": own})
        return pb.Objective(policy=_policy(algorithm, sampling.temperature, sampling.max_response_tokens))
    if isinstance(algorithm, DpoConfig):
        return pb.Objective(preference=_preference(algorithm))
    if isinstance(algorithm, RewardModelConfig):
        center = algorithm.center_coefficient
        return pb.Objective(reward_model=pb.RewardModelObjective(center_coefficient=center))
    return pb.Objective(sft=pb.SftObjective())


def _preference(algorithm: DpoConfig) -> pb.PreferenceObjective:
    return pb.PreferenceObjective(
        loss=PREFERENCE_LOSSES[algorithm.loss],
        beta=algorithm.beta,
        label_smoothing=algorithm.label_smoothing,
        reference_free=algorithm.reference_free,
    )


def value_objective(config: RunConfig, critic: CriticConfig) -> pb.Objective:
    """What the critic of a policy objective learns."""
    return pb.Objective(value=pb.ValueObjective(policy=objective(config).policy, clip=critic.value_clip))


def _policy(algorithm: PolicyConfig, temperature: float, max_response_tokens: int) -> pb.PolicyObjective:
    return pb.PolicyObjective(
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        advantage=_advantage(algorithm.advantage),
        loss=_function(algorithm.loss.type, algorithm.loss.arguments),
        aggregation=pb.Aggregation(
            type=AGGREGATIONS[algorithm.aggregation.type],
            constant_tokens=algorithm.aggregation.constant_tokens or 0,
        ),
        kl=_kl(algorithm.kl),
        correction=_correction(algorithm.correction),
        entropy_coefficient=algorithm.entropy_coefficient,
        shuffle_rewards=algorithm.shuffle_rewards,
        sample_weights=_sample_weights(algorithm.sample_weights),
        teacher=None if algorithm.teacher is None else _teacher(algorithm.teacher),
    )


def _sample_weights(section: SampleWeightsConfig) -> pb.SampleWeights:
    difficulty, length = section.by_difficulty, section.by_length
    return pb.SampleWeights(
        by_reward=REWARD_WEIGHTS[section.by_reward],
        power=section.power,
        by_difficulty=None
        if difficulty is None
        else pb.DifficultyWeights(easiest=difficulty.easiest, hardest=difficulty.hardest),
        by_length=None
        if length is None
        else pb.LengthWeights(shortest=length.shortest, longest=length.longest),
    )


def _advantage(section: AdvantageSection) -> pb.Advantage:
    shared: AdvantageConfig = section
    overlong = None
    if shared.overlong is not None:
        overlong = pb.Overlong(buffer_tokens=shared.overlong.buffer_tokens, penalty=shared.overlong.penalty)
    return pb.Advantage(
        function=_function(section.type, shared.arguments),
        whiten=shared.whiten,
        clip=shared.clip,
        reward_clip=shared.reward_clip,
        overlong=overlong,
        drop_uniform_groups=shared.drop_uniform_groups,
        keep_mean_above=shared.keep_mean_above,
        keep_mean_below=shared.keep_mean_below,
        drop_truncated=shared.drop_truncated,
        reward_normalization=_normalization(shared.reward_normalization),
    )


def _normalization(section: RewardNormalizationConfig | None) -> pb.RewardNormalization | None:
    if section is None:
        return None
    return pb.RewardNormalization(
        mean=STATISTICS[section.mean],
        std=STATISTICS[section.std],
        clip=section.clip,
        scale=section.scale,
    )


def _kl(section: KlConfig) -> pb.Kl:
    return pb.Kl(
        placement=PLACEMENTS[section.placement],
        estimator=ESTIMATORS[section.estimator],
        coefficient=section.coefficient,
        target=section.target,
        horizon_samples=section.horizon_samples,
        reference_is_sent=section.reference == "service",
    )


def _teacher(section: TeacherConfig) -> pb.Teacher:
    return pb.Teacher(
        top_k=section.top_k,
        divergence=TEACHER_DIVERGENCES[section.divergence],
        coefficient=section.coefficient,
        tail=section.tail,
    )


def _correction(section: CorrectionConfig) -> pb.Correction:
    return pb.Correction(
        proximal=PROXIMALS[section.proximal],
        importance=IMPORTANCE[section.importance],
        importance_cap=section.importance_cap,
        importance_floor=section.importance_floor,
        sequence_low=section.sequence_low,
        sequence_high=section.sequence_high,
        staleness_decay=section.staleness_decay,
        fail_at=section.fail_at,
        normalize_importance=section.normalize_importance,
        rejection=[
            pb.Rejection(
                measure=MEASURES[each.measure], over=REJECTED[each.over], low=each.low, high=each.high
            )
            for each in section.rejection
        ],
    )


def _function(name: str, arguments: dict[str, Any]) -> pb.Function:
    parameters = struct_pb2.Struct()
    parameters.update(arguments)
    return pb.Function(name=name, parameters=parameters)
