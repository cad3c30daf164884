"""On-policy distillation on a fleet with real ranks: the student learns from a teacher, held near a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Path:
    """Two small steps without a reward term."""
    run: dict[str, Any] = {
        "name": "distil",
        "steps": 2,
        "data": {"train": str(arithmetic / "data" / "rl.jsonl")},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "sampling": {"max_response_tokens": 6},
        },
        "optimizer": {"learning_rate": 1.0e-3, "schedule": "constant", "epsilon": 1.0e-3},
        "algorithm": {
            "type": "distillation",
            "kl": {"placement": "loss", "reference": "service"},
            # The simulated engine's log-probabilities are not those of any policy.
            "correction": {"warn_at": None, "fail_at": None},
        },
        "weights": {"canary": {"prompts": 0}},
        "export_final": False,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_a_student_learns_from_a_teacher_near_a_reference_without_a_reward(
    gangs: Stack, run_file: Path
) -> None:
    assert {"trainer", "teacher", "reference"} <= {one["name"] for one in gangs.ok("ps")["processes"]}
    run = gangs.run(run_file)
    assert run["state"] == "succeeded", run["reason"]
    assert run["policy_version"] == "0.2"
    for line in gangs.metrics(run):
        assert line["advantages/std"] > 0 and line["grad_norm"] > 0 and line["kl/mean"] > 0
        assert line["time/teacher_s"] > 0 and line["time/reference_s"] > 0
        assert line["reward/mean"] == 0
    verdict = check(gangs.directory / "ledger.sqlite", run["run_id"])
    assert verdict.passed and not verdict.dropped, str(verdict)
