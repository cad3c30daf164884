"""A small model learns to call a calculator by episodes of several turns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3600)

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "calculator"


@pytest.mark.parametrize("seed", range(2))
def test_held_out_sums_are_answered_by_calls_after_training(seed: int) -> None:
    runpy.run_path(str(RECIPE / "train.py"))["story"](seed, [])
