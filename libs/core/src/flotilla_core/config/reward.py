"""Section `rewards` of `run.yaml`: what a sample is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from flotilla_core.config.model import ConfigModel
from flotilla_core.config.user_function import Parameters, function_path, possible_function

LARGEST_REWARD = 1e38
"""Either way; sums and squares of such rewards are still numbers. The contract of the trainer has the same bound."""


class RewardTermConfig(ConfigModel):
    """One term of the weighted sum."""

    reward: Annotated[str, AfterValidator(possible_function)]
    """Built-in name, entry point, or path.py:function."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this term."""
    parameters: Parameters = Field(default_factory=dict)
    """Passed to the reward."""
    timeout_s: float = Field(default=10.0, gt=0, le=86_400)
    """Limit for one sample; then it counts as a timeout, never as a score."""

    def with_paths_from(self, directory: Path) -> Self:
        return self.model_copy(update={"reward": function_path(self.reward, directory)})
