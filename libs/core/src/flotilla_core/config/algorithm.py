"""`algorithm`: the objective. `type` picks a preset, and every section of it can be changed separately."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from flotilla_core.config.advantages import AdvantageConfig, AdvantageSection, DistillAdvantage, GrpoAdvantage
from flotilla_core.config.losses import LossSection, PpoLoss, SampleWeightsConfig
from flotilla_core.config.model import AgreementLimit, ConfigModel
from flotilla_core.config.presets import PRESETS, with_preset
from flotilla_core.config.training import AskedTeachers, CriticConfig, TeacherConfig
from flotilla_core.roles import CRITIC, REFERENCE


class DpoConfig(ConfigModel):
    """Direct preference optimisation: the policy itself learns which of two answers is preferred."""

    type: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of the margin of a pair; docs/preferences.md has the formulas."""
    beta: float = Field(default=0.1, gt=0, le=1000)
    """Strength of the pull towards the initial policy: with a smaller value the policy may move further."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs whose answers are expected to be in the wrong order; for `sigmoid` alone."""
    reference_free: bool = False
    """Ignore the initial policy: the margin uses the log-probabilities alone, and no copy is kept."""

    @model_validator(mode="after")
    def _consistent(self) -> DpoConfig:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing belongs to loss sigmoid, not to {self.loss}: set it to 0")
        return self


class RewardModelConfig(ConfigModel):
    """A reward model: the model with a scalar head, which scores the preferred answer higher."""

    type: Literal["reward_model"] = "reward_model"
    center_coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the squared sum of both rewards of a pair, which keeps rewards around zero; 0 is off."""


class AggregationConfig(ConfigModel):
    """The reduction of token losses to one number; every denominator counts over the whole update."""

    type: Literal[
        "token_mean", "sequence_mean_of_token_sum", "sequence_mean_of_token_mean", "constant", "token_sum"
    ] = "token_mean"
    """Mean over tokens; mean over sequences of their sums; mean over sequences of their means; sum of each sequence
    divided by a constant; or
    the sum over all tokens, divided by nothing."""
    constant_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """The divisor of `constant`; empty takes rollout.sampling.max_response_tokens, of a run with an environment
    environment.episode_tokens."""


def _changed(section: ConfigModel, beside: tuple[str, ...] = ()) -> set[str]:
    """Return the keys of a section that are not at their defaults."""
    usual = {
        name: field.get_default(call_default_factory=True)
        for name, field in type(section).model_fields.items()
    }
    return {name for name, value in section if name not in beside and value != usual[name]}


def _keys(section: str, names: set[str]) -> str:
    return " and ".join(f"{section}.{name}" for name in sorted(names))


class KlConfig(ConfigModel):
    """Penalty on the divergence from the initial policy."""

    placement: Literal["none", "loss", "reward"] = "none"
    """Add the divergence to the loss, or subtract it from the rewards before advantages are computed."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """Estimate of the divergence: log p - log q; half its square; q / p - 1 - log q / p; its absolute value; or the
    divergence over the whole vocabulary."""
    coefficient: float = Field(default=0.001, ge=0, le=1000)
    """Factor of the divergence."""
    target: float | None = Field(default=None, gt=0, le=1000)
    """Mean divergence per token that an adaptive coefficient aims at; empty keeps the coefficient constant."""
    horizon_samples: int = Field(default=10_000, ge=1, le=1_000_000_000)
    """An adaptive coefficient changes by at most a fifth over this many samples."""
    reference: Literal["frozen", "service"] = "frozen"
    """Holder of the initial policy: a frozen copy in the trainer's ranks, or a gang of its own (stack: reference)."""

    @model_validator(mode="after")
    def _is_placed(self) -> KlConfig:
        if self.placement == "none" and (idle := _changed(self, beside=("placement",))):
            raise ValueError(
                f"kl.placement is none, and {_keys('kl', idle)} would change nothing: set kl.placement to loss or "
                "reward, or leave it out"
            )
        if self.target is None and "horizon_samples" in _changed(self):
            raise ValueError(
                "kl.horizon_samples says how fast the coefficient moves towards kl.target, which is empty: set "
                "kl.target, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _full_is_a_loss(self) -> KlConfig:
        if self.estimator == "full" and self.placement == "reward":
            raise ValueError(
                "kl.estimator full is a divergence of whole distributions, and a reward belongs to the sampled "
                "tokens: set kl.placement to loss, or kl.estimator to k1, k2, k3 or abs"
            )
        if self.estimator == "full" and self.placement == "loss" and self.reference == "service":
            raise ValueError(
                "kl.estimator full needs the reference inside the trainer's ranks, because a service tells them of the "
                "sampled tokens alone: set kl.reference to frozen"
            )
        return self


class RejectionConfig(ConfigModel):
    """Leave out tokens or sequences that are too far from the generator's policy."""

    measure: Literal["k1", "k2", "k3", "difference"]
    """Measure of the distance, with r = trainer / generator: r itself; (log r)^2 / 2; r - 1 - log r; or the difference
    of the probabilities."""
    over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """The unit that is left out: a token, or a sequence by the sum, the mean or the maximum of its tokens (for `k1` of
    log r: product and geometric mean)."""
    low: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Leave out values below this; empty is off. For `k1` and `difference`: the others are never negative."""
    high: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Leave out values above this; empty is off."""

    @model_validator(mode="after")
    def _leaves_something(self) -> RejectionConfig:
        if self.low is None and self.high is None:
            raise ValueError(
                "correction.rejection has neither low nor high, and would leave out nothing: set one"
            )
        if self.low is not None and self.measure in ("k2", "k3"):
            raise ValueError(
                f"correction.rejection.low is not for measure {self.measure}, which is never negative and 0 where both "
                "policies agree: set high alone"
            )
        if self.high is not None and self.high <= 0 and self.measure != "difference":
            raise ValueError(
                f"correction.rejection.high is {self.high:g}, but measure {self.measure} is never negative: nothing "
                "would be left"
            )
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                "correction.rejection.low is not below correction.rejection.high: nothing would be left"
            )
        return self


class CorrectionConfig(ConfigModel):
    """Correction for the difference between the policy that sampled and the policy that is trained."""

    proximal: Literal["rollout", "trainer", "interpolated"] = "rollout"
    """The denominator of the ratio: the generator's log-probabilities, the trainer's own before the update, or an
    estimate of the latter that needs no scoring pass."""
    importance: Literal["none", "token", "segment", "sequence", "icepop", "icepop_sequence"] = "none"
    """Weight by trainer / generator: truncated per token, per stretch without context in between, or per sequence; or
    zero outside the limits, per token or per sequence."""
    importance_cap: float = Field(default=2.0, gt=0, le=1e6)
    """Largest weight; for `icepop` and `icepop_sequence`, larger ones are left out."""
    importance_floor: float = Field(default=0.5, ge=0, le=1e6)
    """Smallest weight for `icepop` and `icepop_sequence`: smaller ones are left out."""
    normalize_importance: bool = False
    """Divide the weights of an update by their mean; needs `proximal: trainer`, and scores every update first."""
    rejection: tuple[RejectionConfig, ...] = Field(default=(), max_length=16)
    """Leave out tokens and sequences that any of these rules rejects; denominators stay the same."""
    sequence_low: float | None = Field(default=None, ge=0, le=1e6)
    """Leave out sequences whose geometric mean of trainer / generator is below this; empty is off."""
    sequence_high: float | None = Field(default=None, gt=0, le=1e6)
    """Leave out sequences whose geometric mean of trainer / generator is above this; empty is off."""
    staleness_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor on the weight of a token, in every term of the loss, for each version by which it is older than the
    trained one."""
    warn_at: AgreementLimit | None = "auto"
    """Mean difference of token probabilities between generator and trainer, under one version, that logs a warning;
    `auto` is what rounding explains in the dtypes of the stack, or more where the canary measured more."""
    fail_at: AgreementLimit | None = "auto"
    """Mean difference, as for `warn_at`, that rejects the update and fails the run; empty is off for both."""

    @model_validator(mode="after")
    def _has_weights_to_bound_and_normalise(self) -> CorrectionConfig:
        if self.importance.startswith("icepop") and self.importance_floor >= self.importance_cap:
            raise ValueError(
                "correction.importance_floor is not below correction.importance_cap, and correction.importance "
                f"{self.importance} would leave out everything: lower the floor or raise the cap"
            )
        if self.normalize_importance and self.importance == "none":
            raise ValueError(
                "correction.normalize_importance has no weights to normalise, because correction.importance is none"
            )
        if self.normalize_importance and self.proximal != "trainer":
            raise ValueError(
                "correction.normalize_importance needs the weights of the whole update before its first gradient, and "
                f"correction.proximal is {self.proximal}: set it to trainer"
            )
        return self

    @property
    def looks_at_proximal(self) -> bool:
        """Return whether the ratio of the policy of `proximal` to the one that sampled weighs or removes tokens."""
        limited = self.sequence_low is not None or self.sequence_high is not None
        return self.importance != "none" or limited or bool(self.rejection)

    @model_validator(mode="after")
    def _limits_what_it_weighs(self) -> CorrectionConfig:
        idle = _changed(self) & {"importance_cap", "importance_floor"}
        if self.importance != "none":
            idle -= {"importance_cap"}
        if self.importance.startswith("icepop"):
            idle -= {"importance_floor"}
        if idle:
            raise ValueError(
                f"correction.importance is {self.importance}, which {_keys('correction', idle)} does not bound: set "
                "correction.importance to icepop, or for a cap alone to token or sequence, or leave it out"
            )
        return self


NAMED_OTHERWISE = {
    "agentic_reinforce": "has another name here: take step_reinforce with baseline none and normalize_std false, and "
    "normalise rewards by advantage.reward_normalization",
}
"""Advantages over turns that others have, and the way to them."""


class PolicyConfig(ConfigModel):
    """Reinforcement learning on rollouts of the policy."""

    type: Literal[
        "ppo",
        "distillation",
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "pass_at_k",
        "gdpo",
        "remax",
        "grpo_passk",
        "step_reinforce",
        "gigpo",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
        "lite_ppo",
        "pf_ppo",
        "gspo",
        "gmpo",
        "sapo",
        "cispo",
        "clip_cov",
        "kl_cov",
        "dppo_tv",
        "dppo_kl",
        "topr",
        "kimi",
        "dro",
        "raft_plus_plus",
        "tis_grpo",
        "icepop_grpo",
    ] = "grpo"
    """The preset that fills the sections below where they are not written."""
    advantage: AdvantageSection = Field(default_factory=GrpoAdvantage)
    """The conversion of rewards into advantages."""
    loss: LossSection = Field(default_factory=PpoLoss)
    """The loss that the trainer minimises."""
    aggregation: AggregationConfig = Field(default_factory=AggregationConfig)
    """The averaging of token losses."""
    sample_weights: SampleWeightsConfig = Field(default_factory=SampleWeightsConfig)
    """The weight of each sample."""
    kl: KlConfig = Field(default_factory=KlConfig)
    """Distance that the policy keeps to the initial policy."""
    teacher: TeacherConfig | None = None
    """Penalty on the divergence from a teacher over its likeliest tokens (stack: teacher)."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """Correction for the policy that sampled."""
    critic: CriticConfig | None = None
    """The value model; only for the advantage `gae` (stack: critic)."""
    entropy_coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the entropy, which is subtracted from the loss."""
    entropy_cap: float | None = Field(default=None, gt=0, le=100)
    """Entropy of a token, in nats, above which it earns nothing more; empty is off."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards of an update. Such a run must not learn."""

    @property
    def gangs_beside_the_policy(self) -> list[str]:
        """The roles for which the run needs a gang in addition to the policy's."""
        wanted = {CRITIC: self.critic is not None, REFERENCE: self.asks_reference_service}
        return [*(role for role, is_wanted in wanted.items() if is_wanted), *self.teachers_needed]

    @property
    def asked_teachers(self) -> AskedTeachers | None:
        """The section that says which teachers score the samples; None without teachers."""
        return self.advantage if isinstance(self.advantage, DistillAdvantage) else self.teacher

    @property
    def teachers_needed(self) -> list[str]:
        """The roles of the teachers that score the samples."""
        return [] if self.asked_teachers is None else [*self.asked_teachers.teacher_shares]

    @property
    def needs_rewards(self) -> bool:
        """Return whether samples are useless for training without a reward."""
        return not (isinstance(self.advantage, DistillAdvantage) and self.advantage.reward_weight == 0)

    @property
    def asks_reference_service(self) -> bool:
        """Return whether a gang of its own scores every sample by the initial policy."""
        return self.kl.placement != "none" and self.kl.reference == "service"

    @model_validator(mode="before")
    @classmethod
    def _over_its_preset(cls, written: Any) -> Any:
        advantage = written.get("advantage") if isinstance(written, dict) else None
        asked = advantage.get("type") if isinstance(advantage, dict) else None
        if isinstance(asked, str) and asked in NAMED_OTHERWISE:
            raise ValueError(f"advantage.type {asked} {NAMED_OTHERWISE[asked]}")
        name = written.get("type", "grpo") if isinstance(written, dict) else None
        return with_preset(written, name) if isinstance(name, str) and name in PRESETS else written

    @model_validator(mode="after")
    def _caps_what_it_earns(self) -> PolicyConfig:
        if self.entropy_cap is not None and not self.entropy_coefficient:
            raise ValueError(
                "entropy_cap bounds what entropy earns, but entropy_coefficient is 0: set entropy_coefficient, or "
                "leave entropy_cap out"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> PolicyConfig:
        weighted = self.correction.importance != "none"
        if weighted and self.loss.has_ratio and self.correction.proximal == "rollout":
            raise ValueError(
                f"correction.importance is {self.correction.importance}, but the ratio of "
                f"{self.loss.type} compares with the rollout already: set correction.proximal to trainer"
            )
        proximal = self.correction.proximal
        if proximal != "rollout" and not self.loss.has_ratio and not self.correction.looks_at_proximal:
            raise ValueError(
                f"correction.proximal is {proximal}, but loss.type {self.loss.type} has no ratio that would compare "
                "with it, and no correction weighs by it: set correction.proximal to rollout, or correction.importance"
            )
        if self.aggregation.constant_tokens is not None and self.aggregation.type != "constant":
            raise ValueError(
                "aggregation.constant_tokens belongs to aggregation.type constant alone, and that is "
                f"{self.aggregation.type}: leave it out"
            )
        name, critic = self.advantage.type, self.critic
        if (critic is None) == (name == "gae"):
            raise ValueError(
                f"advantage.type is {name} and critic is {'absent' if critic is None else 'there'}: gae needs the "
                "values of a critic and nothing else does; write `critic: {}` beside gae alone"
            )
        if self.kl.placement == "reward" and not self.needs_rewards:
            raise ValueError(
                "kl.placement is reward, which advantage.type distill looks at with a reward_weight above 0 alone: "
                "set kl.placement to loss"
            )
        if name == "pass_at_k" and self.kl.placement == "reward":
            raise ValueError(
                "advantage.type pass_at_k judges the rewards as they came, and kl.placement reward takes the "
                "divergence from them afterwards: set kl.placement to loss"
            )
        if self.sample_weights.look_at_rewards and not self.needs_rewards:
            raise ValueError(
                "sample_weights.by_reward and sample_weights.by_difficulty look at rewards, and advantage.type distill "
                "learns without them while advantage.reward_weight is 0: leave them out, or set it above 0"
            )
        if self.shuffle_rewards and not self.needs_rewards:
            raise ValueError(
                "shuffle_rewards permutes rewards, which advantage.type distill looks at with a reward_weight above 0 "
                "alone: leave it out"
            )
        if name == "gdpo" and (self.shuffle_rewards or self.kl.placement == "reward"):
            raise ValueError(
                "advantage.type gdpo looks at the terms of a reward, and shuffle_rewards and kl.placement reward act "
                "on the sum of them: leave them out"
            )
        if critic is not None and self.kl.target is not None:
            raise ValueError(
                "kl.target adapts the coefficient, which a critic could not follow: leave it out"
            )
        self._normalises_what_counts()
        normalization = self.advantage.reward_normalization
        if critic is not None and normalization is not None and normalization.remembers:
            raise ValueError(
                "advantage.reward_normalization running goes by the updates of the policy, which a critic could not "
                "follow: take group or batch, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_what_its_loss_looks_at(self) -> PolicyConfig:
        """Refuse settings for negative advantages where the advantages are never negative."""
        if self.advantage.type != "grpo_passk" or self.advantage.whiten:
            return self
        if self.loss.type == "raft_plus_plus":
            raise ValueError(
                "loss.type raft_plus_plus leaves out what has a negative advantage, and advantage.type grpo_passk has "
                "none: take the loss ppo"
            )
        if idle := _changed(self.loss) & set(self.loss.below_zero):
            raise ValueError(
                f"{_keys('loss', idle)} acts on negative advantages alone, and advantage.type grpo_passk has none: "
                "leave it out, or set advantage.whiten"
            )
        return self

    @model_validator(mode="after")
    def _has_one_teacher_for_each_sample(self) -> PolicyConfig:
        """Refuse the likeliest tokens of several teachers, which differ, and teachers that are named twice."""
        asked, named = self.asked_teachers, self.teacher
        if named is None or asked is None:
            return self
        if asked is not named and (named.teachers or named.teacher_field is not None):
            raise ValueError(
                "teacher.teachers and teacher.teacher_field are not for advantage.type distill, which says itself who "
                "is asked: write advantage.teachers and advantage.teacher_field instead"
            )
        if asked.averages_teachers:
            raise ValueError(
                f"teacher compares with what one teacher finds likeliest, and {asked.asked_by}.teachers names "
                f"{len(asked.teachers)} for every sample: set {asked.asked_by}.teacher_field, or name one teacher"
            )
        return self

    @model_validator(mode="after")
    def _learns_something_from_the_teacher(self) -> PolicyConfig:
        """Refuse advantages that are all zero if nothing else is learned from, and keys that only act on them."""
        advantage, correction = self.advantage, self.correction
        if not isinstance(advantage, DistillAdvantage) or advantage.coefficient:
            return self
        if self.teacher is None:
            raise ValueError(
                "advantage.coefficient is 0, so that advantage.type distill asks a teacher and learns nothing from it: "
                "set it above 0, or write `teacher: {}` to learn from the tokens that the teacher finds likeliest"
            )
        acting = {
            "advantage.clip": advantage.clip is not None,
            "correction.importance": correction.importance != "none",
            "correction.rejection": bool(correction.rejection),
            "correction.sequence_low": correction.sequence_low is not None,
            "correction.sequence_high": correction.sequence_high is not None,
        }
        idle = " and ".join(key for key, is_set in acting.items() if is_set)
        if idle and not advantage.reward_weight:
            raise ValueError(
                f"{idle} acts on advantages, and all are 0 while advantage.coefficient and advantage.reward_weight "
                "are: leave it out, or set one of both above 0"
            )
        return self

    def _normalises_what_counts(self) -> None:
        """Refuse a normalisation of rewards that the advantage undoes."""
        advantage: AdvantageConfig = self.advantage
        normalization = advantage.reward_normalization
        if normalization is None:
            return
        idle = set()
        bounded = normalization.clip is not None
        if not bounded and _undone(normalization.mean, advantage.compares_over):
            idle.add("mean")
        # A divergence that is subtracted from the rewards keeps its own scale.
        if self.kl.placement != "reward":
            if not bounded and _undone(normalization.std, advantage.scales_over):
                idle.add("std")
            if normalization.scale != 1 and advantage.scales_over != "none":
                idle.add("scale")
        if idle:
            raise ValueError(
                f"{_keys('advantage.reward_normalization', idle)} would change nothing: advantage.type "
                f"{advantage.type}{' with advantage.whiten' if advantage.whiten else ''} centres or scales what comes "
                "of the rewards by itself; leave it out"
            )


def _undone(statistic: str, over: str) -> bool:
    """Return whether a statistic of the rewards cancels out in the comparison over the group or the batch."""
    return statistic != "none" and (over == "group" or (over == "batch" and statistic != "group"))


class SftConfig(ConfigModel):
    """Supervised next-token training on the answers."""

    type: Literal["sft"] = "sft"


def _branch(section: Any) -> str:
    kind = section.get("type") if isinstance(section, dict) else getattr(section, "type", None)
    return kind if kind in ("sft", "dpo", "reward_model") else "policy"


AlgorithmConfig = Annotated[
    Annotated[PolicyConfig, Tag("policy")]
    | Annotated[SftConfig, Tag("sft")]
    | Annotated[DpoConfig, Tag("dpo")]
    | Annotated[RewardModelConfig, Tag("reward_model")],
    Discriminator(_branch),
]
