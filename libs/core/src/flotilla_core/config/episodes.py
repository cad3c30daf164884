"""The environment of a run, in which the policy acts for several turns.

Invariants: an environment is named as a reward is: a built-in, an entry point, or a class in a file of the user's. What
an episode may take is bounded by the run, whatever its environment asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from flotilla_core.config.model import ConfigModel, Parameters, function_path, possible_function


class EnvironmentConfig(ConfigModel):
    """The environment that answers the policy; each sample is an episode of several turns."""

    name: Annotated[str, AfterValidator(possible_function)] = Field(min_length=1)
    """Built-in name, entry point, or path.py:Class."""
    parameters: Parameters = Field(default_factory=dict)
    """Passed to the environment by keyword."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Limit of the turns of an episode; then the environment gives its rewards for what there is. A turn has at most
    `rollout.sampling.max_response_tokens`."""
    episode_tokens: int = Field(default=4096, ge=2, le=10_000_000)
    """Limit of the tokens of one history: prompt, turns, and what the environment says between them. Where no room is
    left, the environment gives its rewards for what there is."""
    episode_timeout_s: float = Field(default=600.0, gt=0, le=604_800)
    """Time limit of an episode; one that takes longer has no reward and is not trained."""
    call_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Time limit of one answer of the environment; one that takes longer has failed."""
    trusted: bool = False
    """Run an environment of yours outside of the jail, as the environment service itself: with its files, its network
    and its variables."""

    def with_paths_from(self, directory: Path) -> Self:
        return self.model_copy(update={"name": function_path(self.name, directory)})
