"""The figures of evaluations, from the rewards of the answers.

Errors are standard errors over prompts, because answers to one prompt depend on each other; one prompt alone has none.
pass@k is the unbiased estimate of how often at least one of k answers to a prompt is right, from all answers that were
drawn, so k is never above their number. maj@n lets the n answers to a prompt vote: the answer with most votes is as
right as its voters are on average, and a tie counts as the mean of those who lead, so that the order of the answers
changes nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from flotilla_core.evaluations import ACCURACY, ERRORS, REWARD_MEAN


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
