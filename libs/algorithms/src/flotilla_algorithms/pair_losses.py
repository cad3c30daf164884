"""The loss of a pair of answers, by the margin with which the preferred one is ahead.

Invariant: each loss takes the margins and its parameters by keyword, and gives one loss a pair with its derivative by
the margin. So a caller with the margins of a whole update needs no second look at it for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flotilla_algorithms.outcomes import Floats


class PairLosses(NamedTuple):
    """One row a pair."""

    losses: Floats
    slopes: Floats
    """Derivatives of the losses by the margins."""


def sigmoid(margins: Floats, *, beta: float, label_smoothing: float = 0.0) -> PairLosses:
    """-(1 - e) log s(beta h) - e log s(-beta h), s the logistic function and e the share of swapped labels."""
    right, wrong = _log_sigmoid(beta * margins), _log_sigmoid(-beta * margins)
    losses: Floats = -(1.0 - label_smoothing) * right - label_smoothing * wrong
    slopes: Floats = beta * (label_smoothing * np.exp(right) - (1.0 - label_smoothing) * np.exp(wrong))
    return PairLosses(losses, slopes)


def ipo(margins: Floats, *, beta: float) -> PairLosses:
    """(h - 1 / (2 beta))^2: a margin to reach, not to exceed."""
    beyond = margins - 0.5 / beta
    return PairLosses(beyond**2, 2.0 * beyond)


def hinge(margins: Floats, *, beta: float) -> PairLosses:
    """max(0, 1 - beta h)."""
    short = 1.0 - beta * margins
    return PairLosses(np.maximum(short, 0.0), np.where(short > 0, -beta, 0.0))


def _log_sigmoid(values: Floats) -> Floats:
    logs: Floats = -np.logaddexp(0.0, -values)
    return logs


PAIR_LOSSES: dict[str, Callable[..., PairLosses]] = {"sigmoid": sigmoid, "ipo": ipo, "hinge": hinge}
