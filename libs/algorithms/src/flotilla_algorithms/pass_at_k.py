"""Advantages that raise the chance that one of k samples is right (pass@k training, analytic form)."""

from __future__ import annotations

from math import comb, sqrt

import numpy as np

from flotilla_algorithms.outcomes import Floats, Outcomes


def pass_at_k(outcomes: Outcomes, *, k: int, right_at: float) -> Floats:
    """The expected group-relative advantage of a sample over all teams of k that its group can form.

    A team is right where one of its members is: it earned at least `right_at`, whatever was taken from its reward
    afterwards. A group that is smaller than k forms one team of all. Groups in which every team is right, or none is,
    get zeros.
    """
    right = outcomes.earned >= right_at
    advantages = np.zeros(right.size)
    end = 0
    for size in outcomes.group_sizes.tolist():
        members = slice(end, end + size)
        end += size
        for_right, for_wrong = _of_group(size, int(right[members].sum()), min(k, size))
        advantages[members] = np.where(right[members], for_right, for_wrong)
    return advantages


def _of_group(size: int, right: int, k: int) -> tuple[float, float]:
    wrong = size - right
    mean = 1.0 - comb(wrong, k) / comb(size, k)
    deviation = sqrt(mean * (1.0 - mean))
    if not deviation:
        return 0.0, 0.0
    # A wrong sample's own teams are right unless all its k - 1 team mates are wrong too.
    own_teams = 1.0 - comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
    return (1.0 - mean) / deviation, (own_teams - mean) / deviation
