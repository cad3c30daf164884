"""The figures of evaluations, from the rewards of the answers, and the words that tell them.

Errors are standard errors over prompts, because answers to one prompt depend on each other; one prompt alone has none.
pass@k is the unbiased estimate of how often at least one of k answers to a prompt is right, from all answers that were
drawn, so k is never above their number. maj@n lets the n answers to a prompt vote: the answer with most votes is as
right as its voters are on average, and a tie counts as the mean of those who lead, so that the order of the answers
changes nothing. A graded reward that never reaches the threshold is told by its mean, never as a failure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

ACCURACY, REWARD_MEAN = "eval/accuracy", "eval/reward_mean"
BEFORE = {ACCURACY: "eval/accuracy_before", REWARD_MEAN: "eval/reward_mean_before"}
"""Figures of the first evaluation that stay among the metrics of the run."""
ERRORS = {ACCURACY: "eval/accuracy_stderr", REWARD_MEAN: "eval/reward_stderr"}
WORDS = {ACCURACY: "accuracy", REWARD_MEAN: "mean reward"}
NONE_RIGHT = "no answer reached success_at"


def pass_at(k: int, right: int, drawn: int) -> float:
    """Return the share of all sets of k drawn answers that contain a right one."""
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)


def vote_of(response: str, after: str) -> str | None:
    """Return the text that a response votes for: all of it, or the line after the last `after`."""
    if not after:
        return response.strip()
    _, found, rest = response.rpartition(after)
    return next(iter(rest.strip().splitlines()), "").strip() if found else None


def majority_right(votes: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return how right the answer with most votes is; 0 where nobody votes."""
    voters: defaultdict[str, list[bool]] = defaultdict(list)
    for vote, is_right in zip(votes, right, strict=True):
        if vote is not None:
            voters[vote].append(is_right)
    most = max(map(len, voters.values()), default=0)
    leaders = [sum(group) / most for group in voters.values() if len(group) == most]
    return sum(leaders) / len(leaders) if leaders else 0.0


def figures_of(
    rewards: Sequence[Sequence[float]], votes: Sequence[Sequence[str | None]], success_at: float
) -> dict[str, float]:
    """Return the figures of one held-out set from the rewards and the votes of the answers to each prompt."""
    drawn = len(rewards[0])
    right = [[reward >= success_at for reward in answers] for answers in rewards]
    counts = [sum(answers) for answers in right]
    found = {ACCURACY: sum(counts) / (len(counts) * drawn)}
    found |= _error(ACCURACY, [count / drawn for count in counts])
    means = [math.fsum(answers) / drawn for answers in rewards]
    found |= {REWARD_MEAN: math.fsum(means) / len(means)} | _error(REWARD_MEAN, means)
    if drawn == 1:
        return found
    found[f"eval/mean@{drawn}"] = found[ACCURACY]
    for k in (1 << power for power in range(drawn.bit_length())):
        found[f"eval/pass@{k}"] = sum(pass_at(k, count, drawn) for count in counts) / len(counts)
    found[f"eval/maj@{drawn}"] = math.fsum(map(majority_right, votes, right)) / len(votes)
    return found


def _error(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the standard error of the mean of the values, where there are several."""
    if len(values) < 2:
        return {}
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return {ERRORS[name]: math.sqrt(squares / (len(values) - 1) / len(values))}


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
    return text if ACCURACY in names else f"{text} ({NONE_RIGHT})"


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
