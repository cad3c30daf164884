"""`algorithm` of runs that learn from pairs of answers, of which one is preferred."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flotilla_core.config.model import ConfigModel


class DpoConfig(ConfigModel):
    """Direct preference optimisation: the policy itself learns which of two answers is preferred."""

    type: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """What the margin of a pair becomes; docs/preferences.md has the formulas."""
    beta: float = Field(default=0.1, gt=0, le=1000)
    """Strength of the pull towards the first policy: the smaller, the further the policy may go."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs whose answers are expected to stand the wrong way round; `sigmoid` alone."""
    reference_free: bool = False
    """Leave the first policy out: the margin is that of the log-probabilities alone, and no copy is kept."""

    @model_validator(mode="after")
    def _consistent(self) -> DpoConfig:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing belongs to loss sigmoid, not to {self.loss}: set it to 0")
        return self


class RewardModelConfig(ConfigModel):
    """A reward model: the model with a head of one number, which gives the preferred answer the higher one."""

    type: Literal["reward_model"] = "reward_model"
    center_coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Factor of the squared sum of both rewards of a pair, which keeps rewards around zero; 0 is off."""
