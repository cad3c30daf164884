"""`algorithm.sample_weights`: how much each sample of an update counts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flotilla_core.config.model import ConfigModel


class DifficultyWeightsConfig(ConfigModel):
    """Weights by the mean reward of a prompt's samples, on a line."""

    easiest: float = Field(default=0.5, ge=0, le=1000)
    """Weight where the mean reward is 1 or more."""
    hardest: float = Field(default=2.0, ge=0, le=1000)
    """Weight where it is 0 or less."""


class LengthWeightsConfig(ConfigModel):
    """Weights by the tokens of a response, on a line between the lengths of the update."""

    shortest: float = Field(default=1.5, ge=0, le=1000)
    """Weight of the shortest response."""
    longest: float = Field(default=0.5, ge=0, le=1000)
    """Weight of the longest response."""


class SampleWeightsConfig(ConfigModel):
    """Factors that multiply; every mean of the update divides by their sum."""

    by_reward: Literal["none", "pow", "max_min", "max_random"] = "none"
    """By the size of the reward to a power; half of a group's weight to its best samples and half to its worst; half to
    its best and half to all others."""
    power: float = Field(default=2.0, gt=0, le=64)
    """The power of `pow`."""
    by_difficulty: DifficultyWeightsConfig | None = None
    """Weigh prompts by how many of their samples fail; empty is off."""
    by_length: LengthWeightsConfig | None = None
    """Weigh responses by their length; empty is off."""

    @property
    def look_at_rewards(self) -> bool:
        """Whether they say nothing without rewards."""
        return self.by_reward != "none" or self.by_difficulty is not None

    @model_validator(mode="after")
    def _power_has_a_use(self) -> Self:
        if self.by_reward != "pow" and self.power != 2.0:
            raise ValueError(
                f"sample_weights.power belongs to sample_weights.by_reward pow, which is {self.by_reward}: leave it out"
            )
        return self
