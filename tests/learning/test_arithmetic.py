"""The example learns on every seed, and does not learn when its rewards say nothing. Minutes each: its own target."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3600)

DEMO = Path(__file__).resolve().parents[2] / "examples" / "arithmetic" / "demo.py"


@pytest.mark.parametrize("seed", range(8))
def test_accuracy_rises_from_the_warm_up_to_ninety_three_percent(seed: int) -> None:
    done = _demo("--seed", str(seed))
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("algorithm", ["dapo", "grpo", "gspo", "ppo", "remax", "rloo"])
def test_other_algorithms_reach_ninety_percent_too(algorithm: str) -> None:
    done = _demo("--algorithm", algorithm)
    assert done.returncode == 0, done.stdout[-2000:]


def test_adapters_reach_ninety_percent_while_the_weights_stay() -> None:
    done = _demo("--lora")
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_mixture_of_experts_reaches_ninety_percent_too() -> None:
    done = _demo("--moe")
    assert done.returncode == 0, done.stdout[-2000:]


def test_shuffled_rewards_teach_nothing() -> None:
    done = _demo("--control")
    assert done.returncode == 0, done.stdout[-2000:]


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The demo, which judges itself: exit code 0 only when accuracy did what it should."""
    command = [sys.executable, DEMO, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
