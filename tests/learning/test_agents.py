"""A small model learns within an agent that knows nothing of Flotilla."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3600)

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "agents"


@pytest.mark.parametrize("agent", ["messages", "chat", "responses"])
def test_held_out_sums_are_answered_by_calls_after_training(agent: str) -> None:
    runpy.run_path(str(RECIPE / "train.py"))["story"](agent, 0, 0.4, [])
