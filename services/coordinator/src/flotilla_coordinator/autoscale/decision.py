"""One generator more, one fewer, or as many as there are.

Invariant: a function of what was measured and of the configuration alone; between the two limits nothing changes, so
that a change does not call for its opposite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flotilla_core.config import AutoscaleConfig


@dataclass(frozen=True)
class Measured:
    """Idle shares of one step."""

    trainer: float
    generators: float


@dataclass(frozen=True)
class Advice:
    """How many generators there should be, and why."""

    generators: int
    why: str


def advice(window: Sequence[Measured], generators: int, config: AutoscaleConfig) -> Advice | None:
    """What to change after these steps with so many generators; None where nothing is."""
    if len(window) < config.window_steps:
        return None
    trainer, idle = fmean(step.trainer for step in window), fmean(step.generators for step in window)
    why = f"in the last {len(window)} steps the trainer waited for rollouts {trainer:.0%} of the time"
    if trainer > config.trainer_waits_above and generators < config.max_generators:
        return Advice(generators + 1, why)
    enough = trainer < config.trainer_waits_above / 2 and idle > config.generators_idle_above
    if enough and generators > config.min_generators:
        return Advice(generators - 1, f"{why}, and the generators were idle {idle:.0%}")
    return None
