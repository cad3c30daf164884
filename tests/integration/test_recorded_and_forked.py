"""On real gangs: a run on a record makes the update of the run that recorded it, and a fork continues its curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from flotilla_testing.runs import LEARNS, MADE_UP, QUICK, any_reward, example_rows, run_on, written
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(600)
SAME = ("loss", "grad_norm", "reward/mean", "tokens/trained", "learning_rate")


def described(example: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    return run_on(
        example_rows(example),
        "recorded",
        3,
        (4, 4, 8),
        rewards=any_reward(folder),
        algorithm={"type": "grpo", **MADE_UP},
        optimizer=LEARNS,
        checkpoint={"every_steps": 1, "keep": 5},
        **QUICK,
        **sections,
    )


def weights(run: dict[str, Any], steps_done: int) -> dict[str, np.ndarray]:
    folder = Path(run["directory"]) / "checkpoints" / f"step-{steps_done:06d}" / "model"
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def test_an_update_on_a_record_and_the_steps_of_a_fork_are_those_of_the_run(
    gangs: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    online = gangs.run(written(tmp_path, described(arithmetic, tmp_path, rollout={"record": True})))
    assert online["state"] == "succeeded", online["reason"]
    record = Path(online["directory"]) / "rollouts"

    again = described(arithmetic, tmp_path)
    again["data"] = {"train": str(record), "recorded": True, "order": "as_written"}
    del again["rewards"]
    later = gangs.run(written(tmp_path, again | {"name": "later"}))
    assert later["state"] == "succeeded", later["reason"]
    for steps_done in (1, 2, 3):
        expected, got = weights(online, steps_done), weights(later, steps_done)
        assert expected.keys() == got.keys() and expected
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-6, err_msg=f"{name}, {steps_done}")
    moved = [np.abs(weights(online, 1)[name] - array).max() for name, array in weights(online, 3).items()]
    assert max(moved) > 1e-4

    # The engine makes other samples up in another lineage; a record says the same.
    forked = gangs.ok("run", "fork", later["run_id"], "--from", "step-000001", "--wait")
    assert forked["state"] == "succeeded", forked["reason"]
    curve = {step["step"]: step for step in gangs.metrics(later)}
    steps = gangs.metrics(forked)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        for name in SAME:
            assert step[name] == pytest.approx(curve[step["step"]][name], rel=1e-5), name
    for name, array in weights(later, 3).items():
        np.testing.assert_allclose(weights(forked, 3)[name], array, rtol=0, atol=1e-6, err_msg=name)
