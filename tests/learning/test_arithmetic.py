"""The example learns on every seed, and does not where rewards say nothing. Runs share a fleet and warm-ups."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.timeout(3600)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
demo = SimpleNamespace(**runpy.run_path(str(EXAMPLE / "demo.py")))
STACK = demo.stack_of("stack.yaml")
WarmUp = Callable[[int], str]


@pytest.fixture(scope="module")
def warm_up() -> Iterator[WarmUp]:
    """Gives the weights that the warm-up of a seed left; the fleet of the demo is up."""
    with demo.fleet(STACK):
        yield functools.cache(functools.partial(demo.warm_up, STACK))


@pytest.mark.parametrize("seed", range(8))
def test_accuracy_rises_from_the_warm_up_to_ninety_three_percent(warm_up: WarmUp, seed: int) -> None:
    run = demo.learn(STACK, warm_up(seed), seed, demo.DEFAULT)
    demo.judge(run["metrics"], demo.LOWEST_END)


@pytest.mark.parametrize("algorithm", ["dapo", "grpo", "gspo", "ppo", "remax", "rloo"])
def test_other_algorithms_reach_ninety_percent_too(warm_up: WarmUp, algorithm: str) -> None:
    stack = demo.stack_of(demo.FILES.get(algorithm, demo.FILES_OF_OTHERS)[0])
    with demo.fleet(stack):  # It is up already but for PPO's, which has a critic.
        run = demo.learn(stack, warm_up(0), 0, algorithm)
    demo.judge(run["metrics"], demo.LOWEST_END_OF_OTHERS)


def test_adapters_reach_ninety_percent_while_the_weights_stay(warm_up: WarmUp) -> None:
    run = demo.learn(STACK, warm_up(0), 0, "grpo", lora=True)
    demo.judge(run["metrics"], demo.LOWEST_END_OF_OTHERS)


def test_shuffled_rewards_teach_nothing(warm_up: WarmUp) -> None:
    run = demo.learn(STACK, warm_up(0), 0, demo.DEFAULT, control=True)
    demo.judge(run["metrics"], demo.LOWEST_END, control=True)


def test_a_mixture_of_experts_reaches_ninety_percent_too_in_the_whole_demo() -> None:
    demo.demo(0, demo.DEFAULT, lora=False, moe=True, control=False)
