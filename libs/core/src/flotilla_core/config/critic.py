"""`algorithm.critic`: the value model of a run, on a gang of its own."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from flotilla_core.config.model import ConfigModel
from flotilla_core.config.optimizer import OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, by itself."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Peak; a critic usually learns faster than its policy."""


class CriticConfig(ConfigModel):
    """A model that learns what reward to expect, and that advantages are measured against."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW of the critic."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e6)
    """Values beyond so large a step from those that the advantages were made with earn nothing; empty is off."""
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000)
    """First steps in which only the critic learns."""
    initial_weights: Path | None = None
    """Folder with the critic's shape, with or without a value head; empty: critic.model of the stack, or, where that
    is empty, what the policy starts from."""
