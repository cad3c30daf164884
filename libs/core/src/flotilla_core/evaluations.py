"""The figures of evaluations by their names, and the words that tell them.

A graded reward that never reaches the threshold is told by its mean, never as a failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

ACCURACY, REWARD_MEAN = "eval/accuracy", "eval/reward_mean"
BEFORE = {ACCURACY: "eval/accuracy_before", REWARD_MEAN: "eval/reward_mean_before"}
"""Figures of the first evaluation that stay among the metrics of the run."""
ERRORS = {ACCURACY: "eval/accuracy_stderr", REWARD_MEAN: "eval/reward_stderr"}
UNSCORED, UNVERIFIABLE = "eval/unscored_rate", "eval/unverifiable_rate"
MOST_VOTERS = 16
"""The largest team whose majority is measured, beside that of all answers: larger ones take long to count."""
WORDS = {ACCURACY: "accuracy", REWARD_MEAN: "mean reward"}
NONE_RIGHT = "no answer reached success_at"


def error_of(name: str) -> str:
    """Return the name of the standard error of a figure."""
    return ERRORS.get(name) or f"eval/stderr_{name.removeprefix('eval/')}"


def team_sizes(drawn: int) -> list[int]:
    """Return the numbers k of answers for which pass@k is measured."""
    return [1 << power for power in range(drawn.bit_length())]


def majority_sizes(drawn: int) -> list[int]:
    """Return the numbers k of answers for which maj@k is measured."""
    return [*(k for k in team_sizes(drawn) if 1 < k < drawn and k <= MOST_VOTERS), drawn]


def named(held_out: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a set under its name."""
    return {f"eval/{held_out}/{name.removeprefix('eval/')}": value for name, value in figures.items()}


def by_set(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the figures of each held-out set, where there are several, by their plain names."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        parts = name.split("/")
        if parts[0] == "eval" and len(parts) == 3:
            found.setdefault(parts[1], {})[f"eval/{parts[2]}"] = value
    return found


def before(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that stay when a later evaluation replaces them, by the names under which they stay."""
    plain = {BEFORE[name]: value for name, value in metrics.items() if name in BEFORE}
    for held_out, figures in by_set(metrics).items():
        plain |= named(held_out, {BEFORE[name]: value for name, value in figures.items() if name in BEFORE})
    return plain


def held_out_text(metrics: Mapping[str, float]) -> str:
    """Return one evaluation in words, set by set where there are several."""
    if sets := by_set(metrics):
        return "held-out " + "; ".join(f"{name}: {_text(figures)}" for name, figures in sets.items())
    return f"held-out {_text(metrics)}"


def told(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the figures that tell an evaluation, the most telling first; a reward of 0 or 1 has one for both."""
    accuracy, mean = metrics[ACCURACY], metrics.get(REWARD_MEAN)
    if mean is None or math.isclose(accuracy, mean, abs_tol=1e-9):
        return (ACCURACY,)
    return (REWARD_MEAN,) if accuracy == 0 and mean > 0 else (ACCURACY, REWARD_MEAN)


def _text(metrics: Mapping[str, float]) -> str:
    names = told(metrics)
    text = ", ".join(f"{WORDS[name]} {_with_error(metrics, name)}" for name in names)
    text = text if ACCURACY in names else f"{text} ({NONE_RIGHT})"
    return text + (f", {metrics[UNSCORED]:.1%} not scored" if metrics.get(UNSCORED) else "")


def _with_error(metrics: Mapping[str, float], name: str) -> str:
    error = metrics.get(ERRORS[name])
    return f"{metrics[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def before_and_after(metrics: Mapping[str, float]) -> list[str]:
    """Return the first and the last evaluation of a run in words, a line for each figure that tells something."""
    if ACCURACY not in metrics:
        return []
    sets = sorted(by_set(metrics).items()) or [("", dict(metrics))]
    step = metrics["eval/step"]
    return [line for name, figures in sets for line in _changes(name, figures, step)]


def _changes(held_out: str, metrics: Mapping[str, float], step: float) -> list[str]:
    names = told(metrics)
    of, lines = f" on {held_out}" if held_out else "", []
    for name in names:
        first, last = metrics.get(BEFORE[name], metrics[name]), _with_error(metrics, name)
        since = f", {last} after {step:.0f} steps" if step else "; not evaluated since"
        lines.append(f"held-out {WORDS[name]}{of}: {first:.3f} before{since}")
    return lines if ACCURACY in names else [f"{lines[0]} ({NONE_RIGHT})"]
