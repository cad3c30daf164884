"""Whether generator and trainer still compute the same policy, nearly enough for the loss, as updates measured it."""

from __future__ import annotations

from collections.abc import Mapping

from flotilla_core.config import AlgorithmConfig, PolicyConfig, RunConfig
from flotilla_core.version import Version

MEASURED = "probs_diff/fresh"
"""Of tokens that the trained version wrote itself: a policy that has moved since others were drawn is no fault."""

CLIPPED = "clip_fraction"
MOST_CLIPPED_AT_FIRST = 0.02


def distance_warning(algorithm: AlgorithmConfig, metrics: Mapping[str, float]) -> str:
    """What to say about rollouts that are further from the trainer than the run wants; empty where they are not."""
    if not isinstance(algorithm, PolicyConfig):
        return ""
    limit, measured = algorithm.correction.warn_at, metrics.get(MEASURED, 0.0)
    if limit is None or measured <= limit:
        return ""
    return (
        f"the probabilities of one version differ between generator and trainer by {measured:.3g} on average, "
        f"above algorithm.correction.warn_at = {limit:g}"
    )


def narrow_clip_warning(config: RunConfig, trained: Version, metrics: Mapping[str, float]) -> str:
    """What to say when a first update clips, which it does only where engine and trainer differ by more than the clip.

    Nothing has moved before it, and with one optimizer step nothing moves within it: every true ratio is 1.
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
