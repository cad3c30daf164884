"""The losses of `algorithm.loss`, and the weight of each sample in them.

Invariant: a class names one function of the trainer and exactly its parameters.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from flotilla_core.config.model import ConfigModel, UserFunction, kind_of


class LossConfig(ConfigModel):
    """The keys that every loss has."""

    has_ratio: ClassVar[bool] = True
    """The loss compares the policy with the one that sampled."""
    below_zero: ClassVar[tuple[str, ...]] = ()
    """The keys that act only where an advantage is negative."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for the function of the trainer."""
        return {name: value for name, value in self if name != "type"}


class PpoLoss(LossConfig):
    """Clipped policy gradient, also that of GRPO and DAPO."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The lower limit of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    """The upper limit of the ratio is 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e6)
    """Largest ratio that counts against a negative advantage; empty is off."""
    below_zero: ClassVar[tuple[str, ...]] = ("clip_low", "dual_clip")


class ReinforceLoss(LossConfig):
    """Plain policy gradient."""

    type: Literal["reinforce"] = "reinforce"
    has_ratio: ClassVar[bool] = False


class GspoLoss(LossConfig):
    """Clipped policy gradient with one ratio per sequence."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """The lower limit of the sequence's ratio is 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0, le=1e6)
    """The upper limit of the sequence's ratio is 1 + clip_high."""
    over: Literal["sequence", "segment"] = "sequence"
    """The unit with one ratio: the whole response, or each stretch that the policy wrote without context in between."""
    below_zero: ClassVar[tuple[str, ...]] = ("clip_low",)


class GmpoLoss(LossConfig):
    """Geometric mean of clipped token ratios."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, gt=0, le=100)
    """The lower limit of the log of a token's ratio is -clip_low."""
    clip_high: float = Field(default=0.4, gt=0, le=100)
    """The upper limit of the log of a token's ratio is clip_high."""
    below_zero: ClassVar[tuple[str, ...]] = ("clip_low",)


class CispoLoss(LossConfig):
    """Policy gradient with clipped, constant importance weights."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """The lower limit of the weight is 1 - clip_low; 1 means no limit."""
    clip_high: float = Field(default=4.0, gt=0, le=1e6)
    """The upper limit of the weight is 1 + clip_high."""


class SapoLoss(LossConfig):
    """Policy gradient with a soft gate in place of the clip."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0, le=1000)
    """Speed at which the gate closes where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0, le=1000)
    """Speed at which the gate closes elsewhere."""
    below_zero: ClassVar[tuple[str, ...]] = ("tau_negative",)


class ClipCovLoss(LossConfig):
    """PPO without the gradient of tokens whose log-probability and advantage have a high covariance."""

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The lower limit of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    """The upper limit of the ratio is 1 + clip_high."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the update's tokens that are selected."""
    covariance_low: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Lower limit of the covariance: the tokens are selected from those above it."""
    covariance_high: float = Field(default=5.0, ge=-1e6, le=1e6)
    """Upper limit of the covariance: the tokens are selected from those below it."""
    below_zero: ClassVar[tuple[str, ...]] = ("clip_low",)


class KlCovLoss(LossConfig):
    """Plain surrogate with a penalty on tokens of the highest covariance."""

    type: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-3, gt=0, le=1)
    """Share of the update's tokens that are penalised."""
    penalty: float = Field(default=1.0, ge=0, le=1000)
    """Factor of the absolute value of the log of their ratio."""


class DppoTvLoss(LossConfig):
    """Policy gradient masked by the change of a token's probability."""

    type: Literal["dppo_tv"] = "dppo_tv"
    limit: float = Field(default=0.15, gt=0, le=1)
    """Largest change of the probability."""
    limit_low: float | None = Field(default=None, gt=0, le=1)
    """Largest fall of the probability, where the advantage is not positive; empty takes `limit`."""
    ratio_cap: float | None = Field(default=None, gt=0, le=1e6)
    """Upper limit of a token's ratio in the loss; empty is off."""
    below_zero: ClassVar[tuple[str, ...]] = ("limit_low",)


class DppoKlLoss(LossConfig):
    """Policy gradient masked by the KL divergence of a token against all others."""

    type: Literal["dppo_kl"] = "dppo_kl"
    limit: float = Field(default=0.05, gt=0, le=1000)
    """Largest divergence."""
    limit_low: float | None = Field(default=None, gt=0, le=1e6)
    """Largest divergence where the advantage is not positive; empty takes `limit`."""
    ratio_cap: float | None = Field(default=None, gt=0, le=1e6)
    """Upper limit of a token's ratio in the loss; empty is off."""
    below_zero: ClassVar[tuple[str, ...]] = ("limit_low",)


class ToprLoss(LossConfig):
    """REINFORCE for good sequences, tapered by the sequence's ratio for bad ones."""

    type: Literal["topr"] = "topr"
    negative_cap: float = Field(default=1.0, gt=0, le=1e6)
    """Largest weight of a bad sequence."""
    below_zero: ClassVar[tuple[str, ...]] = ("negative_cap",)


class KimiLoss(LossConfig):
    """Policy mirror descent with a quadratic pull towards the policy that sampled."""

    type: Literal["kimi"] = "kimi"
    tau: float = Field(default=0.1, ge=0, le=1000)
    """Strength of the pull."""


class DroLoss(LossConfig):
    """REINFORCE with a quadratic pull of every token towards the policy that sampled."""

    type: Literal["dro"] = "dro"
    beta: float = Field(default=0.05, ge=0, le=1e6)
    """Strength of the pull."""


class RaftPlusPlusLoss(LossConfig):
    """Clipped policy gradient on samples with a positive advantage only."""

    type: Literal["raft_plus_plus"] = "raft_plus_plus"
    clip_high: float = Field(default=0.2, gt=0, le=1e6)
    """The upper limit of the ratio is 1 + clip_high."""


class UserLoss(UserFunction, LossConfig):
    """A function of the user: function(tokens, **parameters) returns one loss per token."""

    @property
    def arguments(self) -> dict[str, Any]:
        return self.parameters


LossSection = Annotated[
    Annotated[PpoLoss, Tag("ppo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[ClipCovLoss, Tag("clip_cov")]
    | Annotated[KlCovLoss, Tag("kl_cov")]
    | Annotated[DppoTvLoss, Tag("dppo_tv")]
    | Annotated[DppoKlLoss, Tag("dppo_kl")]
    | Annotated[ToprLoss, Tag("topr")]
    | Annotated[KimiLoss, Tag("kimi")]
    | Annotated[DroLoss, Tag("dro")]
    | Annotated[RaftPlusPlusLoss, Tag("raft_plus_plus")]
    | Annotated[UserLoss, Tag("user")],
    Discriminator(kind_of),
]


class DifficultyWeightsConfig(ConfigModel):
    """Weights by the mean reward of a prompt's samples, linear between the two ends."""

    easiest: float = Field(default=0.5, ge=0, le=1000)
    """Weight where the mean reward is 1 or more."""
    hardest: float = Field(default=2.0, ge=0, le=1000)
    """Weight where the mean reward is 0 or less."""


class LengthWeightsConfig(ConfigModel):
    """Weights by the number of tokens of a response, linear between the shortest and the longest of the update."""

    shortest: float = Field(default=1.5, ge=0, le=1000)
    """Weight of the shortest response."""
    longest: float = Field(default=0.5, ge=0, le=1000)
    """Weight of the longest response."""


class SampleWeightsConfig(ConfigModel):
    """Sample weights, which multiply; every mean of the update divides by their sum."""

    by_reward: Literal["none", "pow", "max_min", "max_random"] = "none"
    """Weight samples by the absolute reward to a power; or give half of a group's weight to its best samples and half
    to its worst; or half to its best and half to all others."""
    power: float = Field(default=2.0, gt=0, le=64)
    """The exponent of `pow`."""
    by_difficulty: DifficultyWeightsConfig | None = None
    """Weight prompts by how many of their samples fail; empty is off."""
    by_length: LengthWeightsConfig | None = None
    """Weight responses by their length; empty is off."""

    @property
    def look_at_rewards(self) -> bool:
        """Return whether the weights need rewards."""
        return self.by_reward != "none" or self.by_difficulty is not None

    @model_validator(mode="after")
    def _power_has_a_use(self) -> Self:
        if self.by_reward != "pow" and self.power != 2.0:
            raise ValueError(
                f"sample_weights.power belongs to sample_weights.by_reward pow, which is {self.by_reward}: leave it out"
            )
        return self
