"""Section `rollout` of `run.yaml`: what one step generates."""

from __future__ import annotations

from pydantic import Field, model_validator

from flotilla_core.config.model import ConfigModel


class SamplingConfig(ConfigModel):
    """How responses are drawn."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 is refused for training rollouts: the trainer could not reproduce the logprobs."""
    top_k: int = Field(default=0, ge=0, le=10_000_000)
    """0 is off; above 0 is refused for training rollouts."""
    max_response_tokens: int = Field(default=256, ge=1, le=10_000_000)
    """Longest response."""
    min_response_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """No end of sequence before so many tokens."""


class DynamicSamplingConfig(ConfigModel):
    """Groups whose rewards are all equal are left out, and other prompts are drawn in their place."""

    max_prompts_per_step: int | None = Field(default=None, ge=1, le=1_000_000)
    """Prompts drawn for one step at most; with fewer groups that teach the batch is smaller. Empty takes four times
    rollout.prompts_per_step."""


class RolloutConfig(ConfigModel):
    """What one step generates."""

    prompts_per_step: int = Field(default=64, ge=1, le=100_000)
    """Groups of a batch; prompts drawn for a step where nothing below draws more."""
    samples_per_prompt: int = Field(default=8, ge=1, le=10_000)
    """Size of a group."""
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Updates between the oldest token of a sample and the update that trains it. 0: samples come from the version that
    they train; k: generation runs up to k steps ahead of training."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""
    sample_timeout_s: float = Field(default=300.0, gt=0, le=604_800)
    """A group that is not done after so long is issued again; one that is admitted n steps ahead has (1 + n) times as
    long."""
    max_attempts: int = Field(default=5, ge=1, le=1000)
    """Times that a sample is issued before the run fails, naming the generators' last error."""
    resume_partial: bool = False
    """A sample that a generator gives up part-way (it drains, or a sync broke it) goes on elsewhere after the tokens
    that it has; otherwise it begins anew."""
    max_reward_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's samples that may end as reward error or timeout; above it the run fails."""
    generators: int | None = Field(default=None, ge=1, le=256)
    """Generators that the run takes at most; empty: its even share of all, and all while it is alone."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Train only groups that teach; absent: every group is trained."""
    over_issue: float = Field(default=0.0, ge=0, le=1)
    """So many more groups are under way than a batch needs, as a share of it; it is made of the first that end, and the
    others count for the next step where `max_staleness` lets them, or are given up."""

    @model_validator(mode="after")
    def _replaces_what_can_be_judged(self) -> RolloutConfig:
        if self.dynamic_sampling is None:
            return self
        limit = self.dynamic_sampling.max_prompts_per_step
        if limit is not None and limit < self.prompts_per_step:
            raise ValueError(
                f"dynamic_sampling.max_prompts_per_step is {limit}, less than prompts_per_step = "
                f"{self.prompts_per_step}: no batch could be full"
            )
        if self.samples_per_prompt < 2:
            raise ValueError(
                "dynamic_sampling compares the rewards of a group, and samples_per_prompt is 1: "
                "set it to 2 or more (8 is usual)"
            )
        return self

    @property
    def longest_sample_s(self) -> float:
        """The limit of a group that is admitted as early as it may be."""
        return self.sample_timeout_s * (1 + self.max_staleness)
