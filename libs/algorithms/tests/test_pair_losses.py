"""Every loss of a pair against its paper's formula in float64: values, and slopes by differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flotilla_algorithms import PAIR_LOSSES

TOLERANCE = 1e-6
STEP = 1e-5
# Not at 1 / beta of any row, where the hinge has no slope.
MARGINS = np.array([-9.3, -2.1, -0.4, 0.0, 0.3, 1.7, 4.4, 31.0])


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sigmoid(beta: float, smoothing: float) -> Callable[[float], float]:
    return lambda h: (
        -(1 - smoothing) * math.log(logistic(beta * h)) - smoothing * math.log(1 - logistic(beta * h))
    )


TABLE: dict[str, tuple[str, dict[str, Any], Callable[[float], float]]] = {
    "sigmoid": ("sigmoid", {"beta": 0.1}, sigmoid(0.1, 0.0)),
    "sigmoid, steep": ("sigmoid", {"beta": 0.9}, sigmoid(0.9, 0.0)),
    "sigmoid, smoothed": ("sigmoid", {"beta": 0.5, "label_smoothing": 0.2}, sigmoid(0.5, 0.2)),
    "ipo": ("ipo", {"beta": 0.1}, lambda h: (h - 1 / (2 * 0.1)) ** 2),
    "hinge": ("hinge", {"beta": 0.5}, lambda h: max(0.0, 1 - 0.5 * h)),
}


@pytest.mark.parametrize("row", TABLE)
def test_every_loss_and_its_slope_equal_the_formula(row: str) -> None:
    name, parameters, formula = TABLE[row]
    got = PAIR_LOSSES[name](MARGINS, **parameters)
    np.testing.assert_allclose(got.losses, [formula(h) for h in MARGINS], atol=TOLERANCE, rtol=TOLERANCE)
    slopes = [(formula(h + STEP) - formula(h - STEP)) / (2 * STEP) for h in MARGINS]
    np.testing.assert_allclose(got.slopes, slopes, atol=TOLERANCE, rtol=TOLERANCE)
    assert np.abs(slopes).max() > 0.01  # There is something to compare.


def test_no_loss_is_missing_from_the_table() -> None:
    assert {name for name, *_ in TABLE.values()} == set(PAIR_LOSSES)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_margins_beyond_reason_stay_finite(name: str) -> None:
    got = PAIR_LOSSES[name](np.array([-1e5, 1e5]), beta=1.0)
    assert np.isfinite(got.losses).all()
    assert np.isfinite(got.slopes).all()
    assert got.losses[0] >= 1e5
