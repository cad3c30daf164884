"""Whether the first steps of a run show anything to learn from.

Invariants: it speaks at most once, when FIRST_STEPS steps are done; where an evaluation before the first step found
something right, or the rewards within groups differ, it stays silent.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_STEPS = 3
ALMOST_ALL = 0.95


class LearningSignal:
    """Watches the evaluation before and the rewards of the first steps."""

    def __init__(self) -> None:
        self._accuracy_before: float | None = None
        self._uniform: list[float] = []

    def evaluated(self, accuracy: float) -> None:
        """Only the first one counts, which is made before any step."""
        if self._accuracy_before is None:
            self._accuracy_before = accuracy

    def step_done(self, steps_done: int, metrics: Mapping[str, float]) -> str:
        """The warning, or nothing."""
        if self._accuracy_before or steps_done > FIRST_STEPS or "reward/std" not in metrics:
            return ""
        # A group of one is always uniform; there the whole step must be.
        alone = metrics["reward/std"] > 0 and metrics["reward/uniform_groups"] == 1
        self._uniform.append(0.0 if alone else metrics["reward/uniform_groups"])
        if len(self._uniform) < FIRST_STEPS or sum(self._uniform) < ALMOST_ALL * FIRST_STEPS:
            return ""
        share = f"{sum(self._uniform) / FIRST_STEPS:.0%}"
        before = "" if self._accuracy_before is None else "accuracy before is 0, and "
        return (
            f"there is almost nothing to learn from: {before}in {share} of the groups of the first {FIRST_STEPS} steps "
            "all rewards are equal. Does the run start from the right weights (initial_weights)? Otherwise the prompts "
            "are too hard or too easy for this model, or the reward function does not tell answers apart"
        )
