"""`autoscale` in `stack.yaml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flotilla_core.config.model import ConfigModel


class AutoscaleConfig(ConfigModel):
    """`autoscale` in `stack.yaml`: how many generators a run needs.

    Adjusts the number of generators by the idle time of trainer and generators.
    """

    mode: Literal["advise", "act"] = "advise"
    """`advise` reports what would help; with `act` the launcher does it."""
    min_generators: int = Field(default=1, ge=1, le=256)
    """Lower limit of the number of generators."""
    max_generators: int = Field(default=8, ge=1, le=256)
    """Upper limit of the number of generators: as many as the machine, or its GPUs, can take."""
    window_steps: int = Field(default=5, ge=1, le=10_000)
    """The decision uses the mean over this many steps, all of them with the same number of generators."""
    cooldown_steps: int = Field(default=10, ge=0, le=100_000)
    """Steps after a change before the next decision."""
    trainer_waits_above: float = Field(default=0.4, gt=0, lt=1)
    """Share of a step that the trainer waits for rollouts; above it one more generator is wanted."""
    generators_idle_above: float = Field(default=0.5, gt=0, lt=1)
    """Share of a step in which a generator has no sample; above it, if the trainer waits for less than half of
    `trainer_waits_above`, one generator fewer is wanted."""

    @model_validator(mode="after")
    def _has_room(self) -> AutoscaleConfig:
        if self.min_generators > self.max_generators:
            raise ValueError(
                f"min_generators is {self.min_generators}, but max_generators is {self.max_generators}: "
                "set max_generators to at least as many"
            )
        return self
