"""Section `rewards` of `run.yaml`: what a sample is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field

from flotilla_core.config.model import ConfigModel
from flotilla_core.config.user_function import function_path


class RewardTermConfig(ConfigModel):
    """One term of the weighted sum."""

    reward: str
    """Built-in name, entry point, or path.py:function."""
    weight: float = 1.0
    """Factor of this term."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reward."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Limit for one sample; then it counts as a timeout, never as a score."""

    def with_paths_from(self, directory: Path) -> Self:
        return self.model_copy(update={"reward": function_path(self.reward, directory)})
