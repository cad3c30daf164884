"""An evaluation beside the training is about its own version, whatever the others serve meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flotilla_testing.stack import light_stack

pytestmark = pytest.mark.timeout(180)

STEPS = 4
SECONDS_PER_TOKEN = 0.1
EVALUATION_TOKENS = 50


def test_training_goes_on_while_one_of_two_generators_is_asked(arithmetic: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        yaml.safe_dump(
            {
                "name": "pinned",
                "steps": STEPS,
                "data": {"train": str(arithmetic / "data" / "rl.jsonl")},
                "rollout": {
                    "prompts_per_step": 4,
                    "samples_per_prompt": 2,
                    "sampling": {"max_response_tokens": 1},
                },
                "rewards": [{"reward": "exact"}],
                "evaluation": {
                    "data": str(arithmetic / "data" / "heldout.jsonl"),
                    "max_prompts": 4,
                    "max_response_tokens": EVALUATION_TOKENS,
                    "pinned": True,
                },
                "weights": {"canary": {"prompts": 0}},
                "checkpoint": {"every_steps": 0},
                "export_final": False,
            }
        )
    )
    sim = {"seconds_per_token": SECONDS_PER_TOKEN, "response_tokens": 1000}
    with light_stack(arithmetic / "model", tmp_path, sim=sim, replicas=2) as stack:
        run = stack.run(run_file)
        assert run["state"] == "succeeded", run["reason"]
        members = [int(row["sync/members"]) for row in stack.metrics(run)]
    assert 1 in members, "somebody stayed behind"
    lines = (Path(run["directory"]) / "evaluations.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines]
    assert [(one["step"], one["policy_version"]) for one in evaluations] == [
        (0, "0.0"),
        (STEPS, f"0.{STEPS}"),
    ]
