"""AdamW and its schedule, for whatever learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flotilla_core.config.model import ConfigModel

MomentDecay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(ConfigModel):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Peak."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after the warm-up."""
    warmup_updates: int = Field(default=0, ge=0, le=10_000_000)
    """Updates of linear warm-up."""
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    betas: tuple[MomentDecay, MomentDecay] = (0.9, 0.999)
    """Moment decays."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Decoupled."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=1e9)
    """Global clip; 0 is off."""
    max_skipped_updates: int = Field(default=3, ge=1, le=10_000_000)
    """Non-finite updates in a row before the run fails."""
    steps_per_update: int = Field(default=1, ge=1, le=10_000)
    """Optimizer steps of one pass over an update, each on a mini-batch of whole groups with a mean of its own."""
    epochs_per_update: int = Field(default=1, ge=1, le=1000)
    """Passes over the samples of an update. The schedule counts updates, whatever their steps."""
    offload: bool = False
    """Keep AdamW's moments in host memory between updates: frees 8 bytes a parameter on the GPUs, costs transfers."""

    @property
    def steps_of_an_update(self) -> int:
        """Optimizer steps of an update, all passes together."""
        return self.steps_per_update * self.epochs_per_update
