"""PPO on a fleet whose policy and critic are real gangs: how both learn, and what is kept of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla_cli.options import RUN_FAILED
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_testing.runs import ppo_run
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)


def test_policy_and_critic_learn_in_turns_and_lie_in_one_checkpoint(
    gangs: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    run = gangs.run(ppo_run(arithmetic / "data" / "rl.jsonl", tmp_path))
    assert run["state"] == "succeeded", run["reason"]
    assert run["policy_version"] == "0.2"
    first, second, third = gangs.metrics(run)
    assert "loss" not in first and second["loss"] != third["loss"]
    for line in (first, second, third):
        assert line["critic/loss"] > 0 and line["critic/grad_norm"] > 0 and line["time/critic_s"] > 0
        assert line["critic/explained_variance"] <= 1
    # The head of a critic of a language model says nothing at first, and something after its first update.
    assert first["critic/value_mean"] == 0 != second["critic/value_mean"]
    verdict = assert_accounted_for(gangs, run["run_id"])
    assert verdict.trained == 16 and verdict.dropped == {"critic_only": 8}
    assert {"trainer", "critic"} <= {one["name"] for one in gangs.ok("ps")["processes"]}
    assert gangs.flotilla("logs", "critic", "-n", "1").code == 0

    shelf = CheckpointShelf(Path(run["directory"]) / "checkpoints")
    assert shelf.names() == ["step-000002", "step-000003"]
    (shelf.folder("step-000003") / "critic" / "trainer.json").unlink()
    verified = gangs.flotilla("checkpoint", "verify", run["run_id"], "--json")
    assert verified.code == RUN_FAILED
    problems = [one["problem"] for one in verified.json["checkpoints"]]
    assert problems[0] == "" and "critic/trainer.json: the file is missing" in problems[1]
