"""An evaluation beside the training is about its own version, whatever the others serve meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_testing.runs import QUICK, example_rows, run_on, written
from flotilla_testing.stack import light_stack

pytestmark = pytest.mark.timeout(180)

STEPS = 4
SECONDS_PER_TOKEN = 0.1
EVALUATION_TOKENS = 50


def test_training_goes_on_while_one_of_two_generators_is_asked(arithmetic: Path, tmp_path: Path) -> None:
    evaluation = {
        "data": str(arithmetic / "data" / "heldout.jsonl"),
        "max_prompts": 4,
        "max_response_tokens": EVALUATION_TOKENS,
        "pinned": True,
    }
    sections = {"evaluation": evaluation, "checkpoint": {"every_steps": 0}, **QUICK}
    run_file = written(tmp_path, run_on(example_rows(arithmetic), "pinned", STEPS, (4, 2, 1), **sections))
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
