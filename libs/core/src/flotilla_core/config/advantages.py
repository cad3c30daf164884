"""`algorithm.advantage`: what a reward becomes before it reaches a loss.

Invariant: a class names one function of flotilla_algorithms and exactly its parameters; the base class holds what
every advantage shares.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from flotilla_core.config.model import ConfigModel, UserFunction, kind_of
from flotilla_core.config.training import AskedTeachers

Compared = Literal["none", "group", "batch"]
"""The samples that are looked at together: each by itself, those of one prompt, or all of the update."""


class OverlongConfig(ConfigModel):
    """Punishment of responses that come near the length limit."""

    buffer_tokens: int = Field(ge=1, le=10_000_000)
    """The punishment begins this many tokens before rollout.sampling.max_response_tokens, or in a run with an
    environment before environment.episode_tokens."""
    penalty: float = Field(default=1.0, gt=0, le=1e6)
    """Subtracted from the reward at the limit."""


class RewardNormalizationConfig(ConfigModel):
    """Rewards in units of their own spread."""

    mean: Literal["none", "group", "batch", "running"] = "none"
    """The mean that is subtracted from a reward: of its prompt's samples, of the update, or of all updates so far."""
    std: Literal["none", "group", "batch", "running"] = "none"
    """The standard deviation by which it is divided: over the same samples as for `mean`."""
    clip: float | None = Field(default=None, gt=0, le=1e6)
    """Largest absolute value of a normalised reward; empty is off."""
    scale: float = Field(default=1.0, gt=0, le=1e6)
    """Factor that multiplies the normalised reward."""

    @property
    def compares_groups(self) -> bool:
        """Return whether samples are compared within their prompt."""
        return "group" in (self.mean, self.std)

    @property
    def remembers(self) -> bool:
        """Return whether the rewards of earlier updates count."""
        return "running" in (self.mean, self.std)

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.mean == self.std == "none" and self.clip is None and self.scale == 1:
            raise ValueError(
                "advantage.reward_normalization names neither mean, std, clip nor scale: set one, or leave it out"
            )
        return self


class AdvantageConfig(ConfigModel):
    """The keys that every advantage has."""

    type: str
    """Name of the advantage."""
    whiten: bool = False
    """Centre the advantages of all trained tokens and divide them by their deviation."""
    clip: float | None = Field(default=None, gt=0, le=1e6)
    """Largest absolute value of an advantage; empty is off."""
    reward_clip: float | None = Field(default=None, gt=0, le=1e9)
    """Largest absolute value of a reward, applied before anything else; empty is off."""
    overlong: OverlongConfig | None = None
    """Punish responses that come near the limit, after `reward_clip`; empty is off."""
    reward_normalization: RewardNormalizationConfig | None = None
    """Centre and scale rewards, after `reward_clip` and `overlong`; empty is off."""
    drop_truncated: bool = False
    """Leave out responses that were cut off at the length limit, denominators included."""
    drop_uniform_groups: bool = False
    """Leave out groups whose rewards are all equal, denominators included."""
    keep_mean_above: float | None = Field(default=None, ge=-1e9, le=1e9)
    """Leave out groups whose mean reward is not above this; empty is off."""
    keep_mean_below: float | None = Field(default=None, ge=-1e9, le=1e9)
    """Leave out groups whose mean reward is not below this; empty is off."""
    needs_distributions: ClassVar[bool] = False
    """The policy scores every update beforehand, for its distribution at each token."""
    needs_greedy_reward: ClassVar[bool] = False
    """The greedy response to each prompt is generated and scored in addition to its samples."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for the function of flotilla_algorithms."""
        return {name: value for name, value in self if name not in AdvantageConfig.model_fields}

    @property
    def min_group_samples(self) -> int:
        """The smallest group size for which the advantage is defined."""
        return 2

    @property
    def needed_group_samples(self) -> int:
        """The smallest group size, with the processing of the rewards included."""
        normalization = self.reward_normalization
        return max(
            self.min_group_samples, 2 if normalization is not None and normalization.compares_groups else 1
        )

    @property
    def shapes_rewards(self) -> bool:
        """Return whether rewards are changed before the advantage is computed."""
        return not (self.reward_clip is None and self.overlong is None and self.reward_normalization is None)

    @property
    def compares_over(self) -> Compared:
        """The samples over which rewards are centred: a constant added to all their rewards changes no advantage."""
        return "none"

    @property
    def scales_over(self) -> Compared:
        """The samples over which rewards are scaled: a common factor of all their rewards changes no advantage."""
        return "batch" if self.whiten else "none"


class WhitenedAdvantage(AdvantageConfig):
    """An advantage that includes whitening."""

    scales_over: ClassVar[Compared] = "batch"

    @model_validator(mode="after")
    def _is_whitened_once(self) -> Self:
        if self.whiten:
            raise ValueError(
                f"advantage.type {self.type} is whitened already, and advantage.whiten would change nothing: "
                "leave it out"
            )
        return self


class GrpoAdvantage(AdvantageConfig):
    """Reward minus a mean, over a deviation."""

    type: Literal["grpo"] = "grpo"
    baseline: Literal["group", "batch", "running"] = "group"
    """The mean with which a reward is compared: of its prompt's samples, of the update, or of all updates so far."""
    normalize_std: bool = True
    """Divide centred rewards by their standard deviation (of the group, the update or the run, as `baseline`)."""

    @property
    def min_group_samples(self) -> int:
        return 2 if self.baseline == "group" else 1

    @property
    def compares_over(self) -> Compared:
        return "none" if self.baseline == "running" else self.baseline

    @property
    def scales_over(self) -> Compared:
        return self.compares_over if self.normalize_std else super().scales_over

    @model_validator(mode="after")
    def _remembers_once(self) -> Self:
        normalization = self.reward_normalization
        if self.baseline == "running" and normalization is not None and normalization.remembers:
            raise ValueError(
                "advantage.baseline is running and advantage.reward_normalization is too: rewards would be normalised "
                "by all updates so far twice; leave one of them out"
            )
        return self


class GrpoPasskAdvantage(AdvantageConfig):
    """The best sample of a group gets its lead over the second best; the others get nothing."""

    type: Literal["grpo_passk"] = "grpo_passk"
    normalize_std: bool = True
    """Divide the lead by the standard deviation of the group."""
    compares_over: ClassVar[Compared] = "group"

    @property
    def scales_over(self) -> Compared:
        return "group" if self.normalize_std else super().scales_over


class OptimalTokenBaselineAdvantage(AdvantageConfig):
    """Return from each token on, minus the optimal baseline at its position in the response."""

    type: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    lone_tail: Literal["silent", "return"] = "silent"
    """The advantage of a token at a position that no other sample of its group reaches: 0, or the plain return."""
    needs_distributions: ClassVar[bool] = True


class TirOptimalTokenBaselineAdvantage(AdvantageConfig):
    """The optimal token baseline with positions counted by trained tokens alone, for responses with context."""

    type: Literal["tir_optimal_token_baseline"] = "tir_optimal_token_baseline"
    lone_tail: Literal["silent", "return"] = "return"
    """The advantage of a token at a position that no other sample of its group reaches: 0, or the plain return."""
    needs_distributions: ClassVar[bool] = True


class StepReinforceAdvantage(AdvantageConfig):
    """Return of each turn, compared with all turns of the group or the update."""

    type: Literal["step_reinforce"] = "step_reinforce"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per turn."""
    baseline: Literal["none", "group", "batch"] = "group"
    """The baseline of a return: none, or the mean over the turns of its prompt's samples or of the update."""
    normalize_std: bool = True
    """Divide centred returns by their standard deviation (of the group or the update, as `baseline`)."""

    @property
    def min_group_samples(self) -> int:
        return 2 if self.baseline == "group" else 1

    @property
    def compares_over(self) -> Compared:
        return self.baseline if self.gamma == 1 else "none"

    @property
    def scales_over(self) -> Compared:
        return self.baseline if self.normalize_std else super().scales_over

    @model_validator(mode="after")
    def _scales_what_it_centres(self) -> Self:
        if self.baseline == "none" and self.normalize_std:
            raise ValueError(
                "advantage.normalize_std divides centred returns, and advantage.baseline none centres nothing: set "
                "normalize_std to false, or take the baseline group or batch"
            )
        return self


class GigpoAdvantage(AdvantageConfig):
    """Group-relative, and group-relative again among the turns of a group that were asked in the same state."""

    type: Literal["gigpo"] = "gigpo"
    gamma: float = Field(default=0.95, gt=0, le=1)
    """Discount per turn of the returns that are compared."""
    step_weight: float = Field(default=1.0, gt=0, le=1000)
    """Factor of the comparison of turns, which is added to that of whole samples."""
    normalize_std: bool = True
    """Divide centred rewards, and centred returns, by the standard deviation of those that they are compared with."""

    @property
    def compares_over(self) -> Compared:
        return "group" if self.gamma == 1 else "none"

    @property
    def scales_over(self) -> Compared:
        return "group" if self.normalize_std else super().scales_over


class RlooAdvantage(AdvantageConfig):
    """Reward minus the mean of the other samples of its group."""

    type: Literal["rloo"] = "rloo"
    compares_over: ClassVar[Compared] = "group"


class ReinforceAdvantage(AdvantageConfig):
    """Discounted return from each token on."""

    type: Literal["reinforce"] = "reinforce"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    min_group_samples: ClassVar[int] = 1

    @property
    def compares_over(self) -> Compared:
        return "batch" if self.whiten and self.gamma == 1 else "none"


class ReinforcePlusPlusAdvantage(WhitenedAdvantage):
    """Discounted returns, whitened over the update."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    min_group_samples: ClassVar[int] = 1

    @property
    def compares_over(self) -> Compared:
        return "batch" if self.gamma == 1 else "none"


class ReinforcePlusPlusBaselineAdvantage(WhitenedAdvantage):
    """Reward minus the mean of its group, whitened over the update."""

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    compares_over: ClassVar[Compared] = "group"


class OpoAdvantage(AdvantageConfig):
    """Reward minus the mean of its group weighted by length."""

    type: Literal["opo"] = "opo"
    compares_over: ClassVar[Compared] = "group"


class GpgAdvantage(AdvantageConfig):
    """Group-relative, scaled up by the share of samples whose group has different rewards."""

    type: Literal["gpg"] = "gpg"
    normalize_std: bool = False
    """Divide centred rewards by the standard deviation of their group."""
    compares_over: ClassVar[Compared] = "group"

    @property
    def scales_over(self) -> Compared:
        return "group" if self.normalize_std else super().scales_over


class PassAtKAdvantage(AdvantageConfig):
    """Group-relative over all teams of k samples, of which one has to be correct."""

    type: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=4, ge=2, le=10_000)
    """Number of samples in a team."""
    right_at: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Reward from which a sample counts as correct."""

    @property
    def min_group_samples(self) -> int:
        return self.k

    @model_validator(mode="after")
    def _judges_outcomes(self) -> PassAtKAdvantage:
        if self.shapes_rewards:
            raise ValueError(
                "advantage.type pass_at_k judges the rewards as they came, and advantage.reward_clip, "
                "advantage.overlong and advantage.reward_normalization change what it does not look at: leave them "
                "out, or make the punishment one of the rewards"
            )
        return self


class GaeAdvantage(AdvantageConfig):
    """Generalised advantage estimation over the values of a critic."""

    type: Literal["gae"] = "gae"
    unit: Literal["token", "turn"] = "token"
    """The step of the estimation: a token, or a turn as a whole, which the critic judges by the value before its first
    token."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per `unit`."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Weight of later rewards and values against the critic's expectation; 1 relies on the rewards alone."""
    bootstrap_truncated: bool = True
    """Use the critic's value as the return after a response that was cut off at the length limit; false: use 0 there,
    as after a response that ended."""
    # The critic's values have the scale of the rewards, so a change of that scale matters.
    scales_over: ClassVar[Compared] = "none"
    min_group_samples: ClassVar[int] = 1

    @property
    def compares_over(self) -> Compared:
        return "batch" if self.whiten and self.gamma == self.lam == 1 else "none"


class DistillAdvantage(AskedTeachers, AdvantageConfig):
    """Difference between the log-probabilities of a teacher and of the policy that sampled, for each token."""

    type: Literal["distill"] = "distill"
    coefficient: float = Field(default=1.0, ge=0, le=1000)
    """Factor of the teacher's log-probability minus the rollout's; 0 is allowed only with `algorithm.teacher`."""
    reward_weight: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the group's reward advantage, which is added; with 0 the rewards may be empty."""
    compares_over: ClassVar[Compared] = "group"
    scales_over: ClassVar[Compared] = "group"

    @property
    def arguments(self) -> dict[str, Any]:
        # These keys choose the teachers and are used before the function is called.
        asked = AskedTeachers.model_fields
        return {name: value for name, value in super().arguments.items() if name not in asked}

    @property
    def min_group_samples(self) -> int:
        return 2 if self.reward_weight else 1

    @model_validator(mode="after")
    def _shapes_what_it_looks_at(self) -> DistillAdvantage:
        if not self.reward_weight and self.shapes_rewards:
            raise ValueError(
                "advantage.type distill looks at no reward while advantage.reward_weight is 0, so that "
                "advantage.reward_clip, advantage.overlong and advantage.reward_normalization would change nothing: "
                "leave them out, or set advantage.reward_weight above 0"
            )
        return self

    @model_validator(mode="after")
    def _keeps_its_scale(self) -> DistillAdvantage:
        usual = DistillAdvantage.model_fields["coefficient"].default
        if self.whiten and not self.reward_weight and self.coefficient != usual:
            raise ValueError(
                f"advantage.coefficient {self.coefficient:g} scales all advantages alike while advantage.reward_weight "
                "is 0, and advantage.whiten takes any scale away: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _leaves_out_by_what_it_looks_at(self) -> DistillAdvantage:
        asked = {
            "drop_uniform_groups": self.drop_uniform_groups,
            "keep_mean_above": self.keep_mean_above is not None,
            "keep_mean_below": self.keep_mean_below is not None,
        }
        if not self.reward_weight and any(asked.values()):
            keys = " and ".join(f"advantage.{key}" for key, is_asked in asked.items() if is_asked)
            raise ValueError(
                f"{keys} leaves groups out by their rewards, which may be empty for advantage.type distill while "
                "advantage.reward_weight is 0: leave it out, or set advantage.reward_weight above 0"
            )
        return self


class GdpoAdvantage(WhitenedAdvantage):
    """Each reward term normalised within its group by itself, then their weighted sum whitened."""

    type: Literal["gdpo"] = "gdpo"
    weights: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...] = Field(default=(), max_length=64)
    """One weight for each of `rewards`; empty takes the weights of `rewards`."""

    @model_validator(mode="after")
    def _looks_at_terms(self) -> GdpoAdvantage:
        if self.shapes_rewards:
            raise ValueError(
                "advantage.type gdpo looks at the terms of a reward, and advantage.reward_clip, advantage.overlong and "
                "advantage.reward_normalization change their sum: leave them out, or make the punishment one of the "
                "rewards"
            )
        return self


class RemaxAdvantage(AdvantageConfig):
    """Reward minus the reward of the greedy response to the same prompt."""

    type: Literal["remax"] = "remax"
    min_group_samples: ClassVar[int] = 1
    needs_greedy_reward: ClassVar[bool] = True

    @model_validator(mode="after")
    def _compares_rewards_of_one_kind(self) -> RemaxAdvantage:
        if self.overlong is not None or self.reward_normalization is not None:
            raise ValueError(
                "advantage.type remax compares with the reward of a greedy response, which advantage.overlong does not "
                "punish and advantage.reward_normalization does not centre: leave them out, or make the punishment one "
                "of the rewards"
            )
        return self


class UserAdvantage(UserFunction, AdvantageConfig):
    """A function of the user: function(outcomes, **parameters) returns one number per sample or per token."""

    # Only the user's function decides what a factor of the rewards changes.
    scales_over: ClassVar[Compared] = "none"
    min_group_samples: ClassVar[int] = 1

    @property
    def arguments(self) -> dict[str, Any]:
        return self.parameters


AdvantageSection = Annotated[
    Annotated[GrpoAdvantage, Tag("grpo")]
    | Annotated[GrpoPasskAdvantage, Tag("grpo_passk")]
    | Annotated[StepReinforceAdvantage, Tag("step_reinforce")]
    | Annotated[OptimalTokenBaselineAdvantage, Tag("optimal_token_baseline")]
    | Annotated[TirOptimalTokenBaselineAdvantage, Tag("tir_optimal_token_baseline")]
    | Annotated[GigpoAdvantage, Tag("gigpo")]
    | Annotated[RlooAdvantage, Tag("rloo")]
    | Annotated[ReinforceAdvantage, Tag("reinforce")]
    | Annotated[ReinforcePlusPlusAdvantage, Tag("reinforce_plus_plus")]
    | Annotated[ReinforcePlusPlusBaselineAdvantage, Tag("reinforce_plus_plus_baseline")]
    | Annotated[OpoAdvantage, Tag("opo")]
    | Annotated[GpgAdvantage, Tag("gpg")]
    | Annotated[PassAtKAdvantage, Tag("pass_at_k")]
    | Annotated[GaeAdvantage, Tag("gae")]
    | Annotated[DistillAdvantage, Tag("distill")]
    | Annotated[GdpoAdvantage, Tag("gdpo")]
    | Annotated[RemaxAdvantage, Tag("remax")]
    | Annotated[UserAdvantage, Tag("user")],
    Discriminator(kind_of),
]
