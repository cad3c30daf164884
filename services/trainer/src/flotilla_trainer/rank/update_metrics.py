"""Compute the metrics of a step from its sums over all tokens, and those of an update from the metrics of its steps.

Invariants: a metric is there on every rank or on none, because all ranks get the same columns; only the first step
measures the difference between generator and trainer, because that step already changes the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SUMS = (
    "loss",
    "tokens",
    "entropy",
    "clipped",
    "ratio",
    "correction",
    "left_out",
    "divergence",
    "teacher_divergence",
    "teacher_tokens",
    "logprob_diff",
    "probs_diff",
    "fresh",
    "fresh_probs_diff",
    "rollout_kl",
    "trainer_probs",
    "rollout_probs",
    "trainer_squares",
    "rollout_squares",
    "products",
)
MAXIMA = ("logprob_diff", "probs_diff")

FRESH_ENOUGH = 0.5
"""The least share of tokens written by the trained version with which generator and trainer are compared."""

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


def objective_metrics(totals: dict[str, float], peaks: dict[str, float], names: set[str]) -> dict[str, float]:
    """Return the metrics of those sums whose `names` the objective gave."""
    tokens = totals["tokens"]
    metrics = {"loss": totals["loss"], "tokens/trained": tokens}
    shares = {"entropy": "entropy", "clipped": "clip_fraction", "ratio": "ratio_mean"}
    metrics |= {said: totals[name] / tokens for name, said in shares.items() if name in names}
    if "divergence" in names:
        metrics["kl/mean"] = totals["divergence"] / tokens
    if "teacher_divergence" in names:
        # In one of several mini-batches, no token may count.
        metrics["teacher/divergence"] = totals["teacher_divergence"] / max(1.0, totals["teacher_tokens"])
    if "probs_diff" in names:
        for name, peak in peaks.items():
            metrics |= {f"{name}/mean": totals[name] / tokens, f"{name}/max": peak}
        metrics |= {
            "rollout_kl": totals["rollout_kl"] / tokens,
            "rollout_correlation": _correlation(totals),
            "correction/weight_mean": totals["correction"] / tokens,
            "correction/left_out": totals["left_out"] / tokens,
            "tokens/fresh_share": totals["fresh"] / tokens,
        }
        # An engine's border between two versions is off by a token or two, so a few fresh tokens prove nothing.
        if totals["fresh"] >= FRESH_ENOUGH * tokens:
            metrics["probs_diff/fresh"] = totals["fresh_probs_diff"] / totals["fresh"]
    return metrics


def _correlation(totals: dict[str, float]) -> float:
    """Return the correlation of the probabilities of trainer and rollout; 1 where one of them never varies."""
    tokens = totals["tokens"]
    mean_p, mean_q = totals["trainer_probs"] / tokens, totals["rollout_probs"] / tokens
    variance_p = totals["trainer_squares"] / tokens - mean_p**2
    variance_q = totals["rollout_squares"] / tokens - mean_q**2
    if not (variance_p > 0 and variance_q > 0):
        return 1.0
    return (totals["products"] / tokens - mean_p * mean_q) / math.sqrt(variance_p * variance_q)


def metrics_of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sums of times and tokens over the steps, and the means of all other metrics."""
    first = steps[0]
    metrics = {}
    for name in first:
        values = [step[name] for step in steps if name in step]
        total = sum(values)
        adds_up = name == "tokens/trained" or name.startswith("time/")
        metrics[name] = total if adds_up else total / len(values)
    return metrics | {name: first[name] for name in BEFORE_ANY_STEP if name in first}
