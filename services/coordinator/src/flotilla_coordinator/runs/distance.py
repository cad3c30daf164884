"""Whether generator and trainer still compute the same policy, as the update measured it."""

from __future__ import annotations

from collections.abc import Mapping

from flotilla_core.config import AlgorithmConfig, PolicyConfig

MEASURED = "probs_diff/fresh"
"""Of tokens that the trained version wrote itself: a policy that has moved since others were drawn is no fault."""


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
