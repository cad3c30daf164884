"""On-policy distillation on a fleet with real ranks: the student learns from teachers, held near a reference."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Path:
    """Two small steps without a reward term; every other prompt is for another teacher."""
    rows = (arithmetic / "data" / "rl.jsonl").read_text("utf-8").splitlines()[:8]
    names = itertools.cycle(("math", "code"))
    named = [{**json.loads(row), "domain": name} for row, name in zip(rows, names, strict=False)]
    data = tmp_path / "domains.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in named))
    run: dict[str, Any] = {
        "name": "distil",
        "steps": 2,
        "data": {"train": str(data), "order": "as_written"},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "sampling": {"max_response_tokens": 6},
        },
        "optimizer": {"learning_rate": 1.0e-3, "schedule": "constant", "epsilon": 1.0e-3},
        "algorithm": {
            "type": "distillation",
            "advantage": {"teachers": {"math": 1, "code": 1}, "teacher_field": "domain"},
            "kl": {"placement": "loss", "reference": "service"},
            "teacher": {"top_k": 8, "divergence": "reverse"},
            # The simulated engine's log-probabilities are not those of any policy: most ratios would be clipped.
            "correction": {"proximal": "trainer", "warn_at": None, "fail_at": None},
        },
        "weights": {"canary": {"prompts": 0}},
        "export_final": False,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_a_student_learns_from_the_teacher_of_each_prompt_near_a_reference_without_a_reward(
    gangs: Stack, run_file: Path
) -> None:
    wanted = {"trainer", "teacher-math", "teacher-code", "reference"}
    assert wanted <= {one["name"] for one in gangs.ok("ps")["processes"]}
    run = gangs.run(run_file)
    assert run["state"] == "succeeded", run["reason"]
    assert run["policy_version"] == "0.2"
    for line in gangs.metrics(run):
        assert line["advantages/std"] > 0 and line["grad_norm"] > 0 and line["kl/mean"] > 0
        assert 0 < line["teacher/mass"] < 1
        assert line["time/teacher_s"] > 0 and line["time/reference_s"] > 0
        each = [line["time/teacher_math_s"], line["time/teacher_code_s"]]
        assert 0 < min(each) <= max(each) <= line["time/teacher_s"]
        assert line["reward/mean"] == 0
    # The student is its teachers' equal at first.
    first, second = (line["teacher/divergence"] for line in gangs.metrics(run))
    assert abs(first) < 1e-6 < second
    verdict = check(gangs.directory / "ledger.sqlite", run["run_id"])
    assert verdict.passed and not verdict.dropped, str(verdict)
