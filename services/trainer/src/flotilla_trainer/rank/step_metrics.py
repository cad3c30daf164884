"""Metrics of an update of several optimizer steps from those of its steps.

Invariant: how far the generator is from the trainer is said by the first step alone: it moves the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

BEFORE_ANY_STEP = (
    "logprob_diff/mean",
    "logprob_diff/max",
    "probs_diff/mean",
    "probs_diff/max",
    "probs_diff/fresh",
    "rollout_kl",
    "rollout_correlation",
    "tokens/fresh_share",
)


def metrics_of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Times and tokens of all steps together, means of everything else."""
    first = steps[0]
    metrics = {}
    for name in first:
        values = [step[name] for step in steps if name in step]
        total = sum(values)
        adds_up = name == "tokens/trained" or name.startswith("time/")
        metrics[name] = total if adds_up else total / len(values)
    return metrics | {name: first[name] for name in BEFORE_ANY_STEP if name in first}
