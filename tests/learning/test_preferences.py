"""Pairs of a right and a wrong sum teach the example's model to add better. Minutes: its own target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla_testing.stack import Stack, running_stack

pytestmark = pytest.mark.timeout(1800)

WARM_UP_STEPS = 400
"""Enough to add better than by chance; nobody looks on the way, for that would take a generator."""
LEAST_RANKED_RIGHT = 0.65
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
RUN_TIMEOUT_S = 1500.0
LEAST_GAIN = 0.08


def finished(stack: Stack, file: str, *overrides: str) -> dict[str, Any]:
    run = stack.run(EXAMPLE / file, *overrides, timeout_s=RUN_TIMEOUT_S)
    assert run["state"] == "succeeded", run["reason"]
    return run


def described(arithmetic: Path, **sections: Any) -> dict[str, Any]:
    trainer = {"nproc": 2, "dtype": "float32"}
    return {"name": "preferences", "model": str(arithmetic / "model"), "trainer": trainer, **sections}


def test_held_out_accuracy_rises_from_the_warm_up(arithmetic: Path, tmp_path: Path) -> None:
    data = arithmetic / "data"
    held_out = f"evaluation.data={data / 'heldout.jsonl'}"
    generator = {"dtype": "float32", "max_model_tokens": 64}
    with running_stack(described(arithmetic, generator=generator), tmp_path) as stack:
        warm = finished(stack, "sft.yaml", held_out, f"data.train={data / 'sft.jsonl'}")
        start = f"initial_weights={warm['directory']}/model"
        run = finished(stack, "dpo.yaml", held_out, f"data.train={data / 'preferences.jsonl'}", start)
        steps = stack.metrics(run)
    before, after = run["metrics"]["eval/accuracy_before"], run["metrics"]["eval/accuracy"]
    assert after >= before + LEAST_GAIN
    assert steps[0]["preference/accuracy"] == 0.5
    assert sum(step["preference/accuracy"] for step in steps[-20:]) / 20 >= 0.9


def test_a_reward_model_ranks_held_out_sums_on_a_fleet_of_one_trainer(
    arithmetic: Path, tmp_path: Path
) -> None:
    data = arithmetic / "data"
    nobody = {"replicas": 0}
    with running_stack(described(arithmetic, generator=nobody, reward=nobody), tmp_path) as stack:
        blind = ("evaluation=null", "stop=null", "rewards=[]", f"steps={WARM_UP_STEPS}")
        warm = finished(stack, "sft.yaml", f"data.train={data / 'sft.jsonl'}", *blind)
        held_out = f"evaluation.data={data / 'heldout-preferences.jsonl'}"
        start = f"initial_weights={warm['directory']}/model"
        run = finished(
            stack, "reward_model.yaml", f"data.train={data / 'preferences.jsonl'}", held_out, start
        )
    assert run["metrics"]["eval/accuracy_before"] == 0.5  # A head of zeros prefers nothing.
    assert run["metrics"]["eval/accuracy"] >= LEAST_RANKED_RIGHT
