"""The figures of evaluations, from the rewards of the answers.

An answer without a reward is in no figure, and neither is a prompt that has no other one. Errors are standard errors
over prompts, because answers to one prompt depend on each other; one prompt alone has none. pass@k is the unbiased
estimate of how often at least one of k answers to a prompt is right, from all answers that were scored, so k is never
above their number. maj@k lets k answers to a prompt vote: the answer with most votes is as right as its voters are on
average, and a tie counts as the mean of those who lead. It is the mean over all teams of k answers, so that their order
changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from flotilla_core.evaluations import ACCURACY, REWARD_MEAN, error_of, majority_sizes, team_sizes


@dataclass(frozen=True)
class Answered:
    """The scored answers to one prompt."""

    rewards: Sequence[float]
    right: Sequence[bool]
    votes: Sequence[str | None]

    @property
    def share(self) -> float:
        """Return the share of right answers."""
        return sum(self.right) / len(self.right)


def pass_at(k: int, right: int, drawn: int) -> float:
    """Return the share of all sets of k drawn answers that contain a right one."""
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)


def vote_of(response: str, after: str) -> str | None:
    """Return the text that a response votes for: all of it, or the line after the last `after`."""
    if not after:
        return response.strip()
    _, found, rest = response.rpartition(after)
    return next(iter(rest.strip().splitlines()), "").strip() if found else None


def majority_at(k: int, votes: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return how right the answer with most votes is, on the mean over all teams of k answers; 0 where nobody votes.

    Each answer is counted by the number m of votes with which it leads. Of all ways to draw the teams, `ways` counts
    those by the number of leaders and of answers so far, and `shares` sums up how right these leaders are. Answers that
    have equally many votes and are equally right are counted together: most of many answers are alone.
    """
    voters: defaultdict[str, list[bool]] = defaultdict(list)
    for vote, is_right in zip(votes, right, strict=True):
        if vote is not None:
            voters[vote].append(is_right)
    most = max(map(len, voters.values()), default=0)
    if k == len(votes):
        leaders = [sum(group) / most for group in voters.values() if len(group) == most]
        return sum(leaders) / len(leaders) if leaders else 0.0
    alike = Counter((len(group), sum(group) / len(group)) for group in voters.values())
    silent, found = len(votes) - sum(map(len, voters.values())), 0.0
    for m in range(1, min(k, most) + 1):
        ways = np.zeros((k // m + 1, k + 1))
        ways[0] = [math.comb(silent, drawn) for drawn in range(k + 1)]
        shares = np.zeros_like(ways)
        for (size, share), groups in alike.items():
            ways, shares = _with_groups(ways, shares, m, size, share, groups)
        found += sum(shares[leaders, k] / leaders for leaders in range(1, len(ways)))
    return float(found) / math.comb(len(votes), k)


def _with_groups(
    ways: np.ndarray, shares: np.ndarray, m: int, size: int, share: float, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Let teams draw from more groups of equal votes: fewer than m of each, or m, which leads."""
    more_ways, more_shares = np.zeros_like(ways), np.zeros_like(shares)
    rows, end = ways.shape
    fewer = np.array([float(math.comb(size, drawn)) for drawn in range(min(size, m - 1) + 1)])
    for leaders in range(min(groups, rows - 1) + 1 if size >= m else 1):
        lead = float(math.comb(groups, leaders) * math.comb(size, m) ** leaders)
        others = _power(fewer, groups - leaders, end - leaders * m)
        for drawn, teams in enumerate(lead * others, start=leaders * m):
            more = teams * ways[: rows - leaders, : end - drawn]
            more_ways[leaders:, drawn:] += more
            more_shares[leaders:, drawn:] += teams * shares[: rows - leaders, : end - drawn]
            if leaders:
                more_shares[leaders:, drawn:] += leaders * share * more
    return more_ways, more_shares


def _power(polynomial: np.ndarray, exponent: int, end: int) -> np.ndarray:
    """Return the first `end` coefficients of a power of a polynomial."""
    found = np.ones(1)
    while exponent:
        if exponent % 2:
            found = np.convolve(found, polynomial)[:end]
        if exponent := exponent // 2:
            polynomial = np.convolve(polynomial, polynomial)[:end]
    return found


def figures_of(
    rewards: Sequence[Sequence[float | None]],
    votes: Sequence[Sequence[str | None]],
    right: Sequence[Sequence[bool]],
) -> dict[str, float]:
    """Return the figures of one held-out set from what is known of the answers to each prompt.

    At least one answer has a reward.
    """
    drawn = len(rewards[0])
    prompts = [one for of in zip(rewards, votes, right, strict=True) if (one := _scored(*of))]
    found = _mean(ACCURACY, (one.share for one in prompts))
    found |= _mean(REWARD_MEAN, (math.fsum(one.rewards) / len(one.rewards) for one in prompts))
    if drawn == 1:
        return found
    found |= _mean(f"eval/mean@{drawn}", (one.share for one in prompts))
    for k in team_sizes(drawn):
        found |= _mean_at(
            f"eval/pass@{k}", k, prompts, lambda k, one: pass_at(k, sum(one.right), len(one.right))
        )
    for k in majority_sizes(drawn):
        found |= _mean_at(f"eval/maj@{k}", k, prompts, lambda k, one: majority_at(k, one.votes, one.right))
    return found


def _scored(
    rewards: Sequence[float | None], votes: Sequence[str | None], right: Sequence[bool]
) -> Answered | None:
    """Return the answers that have a reward."""
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return None
    has = [reward is not None for reward in rewards]
    return Answered(known, [*compress(right, has)], [*compress(votes, has)])


def _mean_at(
    name: str, k: int, prompts: Sequence[Answered], figure: Callable[[int, Answered], float]
) -> dict[str, float]:
    """Return the mean of a figure of k answers over the prompts that have as many."""
    return _mean(name, [figure(k, one) for one in prompts if len(one.rewards) >= k])


def _mean(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return the mean of the values, where there are some, and its standard error, where there are several."""
    values = list(values)
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return {name: mean}
    squares = math.fsum((value - mean) ** 2 for value in values)
    return {name: mean, error_of(name): math.sqrt(squares / (len(values) - 1) / len(values))}
