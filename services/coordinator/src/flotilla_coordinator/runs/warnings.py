"""Warns of a run by its own measurements: generator and trainer differ, or there is nothing to learn from.

Invariants: the warning that there is almost nothing to learn from comes at most once, after FIRST_STEPS steps. It does
not come where an evaluation before the first step found a right answer, or where the rewards within groups differ. The
warning that nothing is learned comes once for SILENT_STEPS steps in a row without any difference, whatever came before.
"""

from __future__ import annotations

from collections.abc import Mapping

from flotilla_core.agreement import AgreementLimits
from flotilla_core.config import PolicyConfig, RunConfig
from flotilla_core.version import Version

MEASURED = "probs_diff/fresh"
"""The metric counts tokens of the trained version alone: that the policy has moved since others were drawn is normal.
"""

CLIPPED = "clip_fraction"
MOST_CLIPPED_AT_FIRST = 0.02

FIRST_STEPS = 3
ALMOST_ALL = 0.95
SILENT_STEPS = 10
ROUNDED = 1e-9
"""A deviation below this is what rounding leaves of equal numbers."""


def policy_mismatch_warning(limits: AgreementLimits, metrics: Mapping[str, float]) -> str:
    """Return the warning that rollouts differ from the trainer by more than the limit; empty where they do not."""
    limit, measured = limits.warn_at, metrics.get(MEASURED, 0.0)
    if limit is None or measured <= limit:
        return ""
    return (
        f"the probabilities of one version differ between generator and trainer by {measured:.3g} on average, "
        f"above algorithm.correction.warn_at = {limit:g}"
    )


def narrow_clip_warning(config: RunConfig, trained: Version, metrics: Mapping[str, float]) -> str:
    """Return the warning that a first update clips, which shows that generator and trainer differ too much.

    The policy has not moved before this update, and with one optimizer step it does not move within it: every true
    ratio is 1.
    """
    algorithm, clipped = config.algorithm, metrics.get(CLIPPED, 0.0)
    first = trained.step == 0 and config.optimizer.steps_of_an_update == 1
    clips = isinstance(algorithm, PolicyConfig) and "clip_low" in algorithm.loss.arguments
    if not first or not clips or clipped <= MOST_CLIPPED_AT_FIRST:
        return ""
    return (
        f"the loss clips {clipped:.0%} of the tokens before the policy has moved: generator and trainer differ by more "
        "than its limits allow, so samples are left out by that difference; set algorithm.correction.proximal to "
        "trainer, or widen algorithm.loss.clip_low and clip_high"
    )


class LearningSignal:
    """Watches whether the evaluations and the rewards of a run show anything to learn from."""

    def __init__(self) -> None:
        self._accuracy_before: float | None = None
        self._uniform: list[float] = []
        self._silent = 0
        self._reward = 0.0

    def evaluated(self, accuracy: float) -> None:
        """Note the first evaluation, which is made before any step; later ones do not count."""
        if self._accuracy_before is None:
            self._accuracy_before = accuracy

    def step_done(self, steps_done: int, metrics: Mapping[str, float]) -> str:
        """Return the warning, or nothing."""
        if "reward/std" not in metrics:
            return ""
        self._silent = self._silent + 1 if _is_silent(metrics) else 0
        self._reward = metrics.get("reward/mean", 0.0)
        return self._at_first(steps_done, metrics) or (
            self._nothing_learned() if self._silent == SILENT_STEPS else ""
        )

    def verdict(self, steps_done: int) -> str:
        """Return what to say at the end: that nothing was learned in the last steps, or in any; else nothing."""
        whole = 0 < self._silent == steps_done
        return self._nothing_learned() if whole or self._silent >= SILENT_STEPS else ""

    def _at_first(self, steps_done: int, metrics: Mapping[str, float]) -> str:
        if self._accuracy_before or steps_done > FIRST_STEPS:
            return ""
        # A group of one sample is always uniform; then the whole step must be.
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

    def _nothing_learned(self) -> str:
        steps = "step" if self._silent == 1 else f"{self._silent} steps"
        return (
            f"no group had two different rewards in the last {steps} (mean reward {self._reward:g}): nothing is "
            "learned. Either every prompt is solved, or too hard, or the reward function does not tell answers apart: "
            "look at answers and rewards with flotilla samples, and try the function with flotilla reward test"
        )


def _is_silent(metrics: Mapping[str, float]) -> bool:
    """Return whether the rewards of a step told no answers apart."""
    if metrics["reward/uniform_groups"] < 1:
        return False
    spread = metrics.get("advantages/std")
    if spread is None:  # The step of a client, whose advantages may come from elsewhere.
        return metrics.get("grad_norm", 0.0) == 0
    equal = metrics["reward/std"] <= ROUNDED * max(1.0, abs(metrics.get("reward/mean", 0.0)))
    return equal or spread <= ROUNDED
