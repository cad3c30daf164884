"""On-policy distillation on a fleet with real ranks: the student learns from teachers, held near a reference."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla_testing.runs import LEARNS, MADE_UP, QUICK, run_on, written
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
    algorithm = {
        "type": "distillation",
        "advantage": {"teachers": {"math": 1, "code": 1}, "teacher_field": "domain"},
        "kl": {"placement": "loss", "reference": "service"},
        "teacher": {"top_k": 8, "divergence": "reverse"},
        # Most ratios of the simulated engine's log-probabilities would be clipped.
        "correction": {"proximal": "trainer", **MADE_UP["correction"]},
    }
    run = run_on(data, "distil", 2, (4, 2, 6), optimizer=LEARNS, algorithm=algorithm, **QUICK)
    run["data"]["order"] = "as_written"
    del run["rewards"]
    return written(tmp_path, run)


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
    verdict = assert_accounted_for(gangs, run["run_id"])
    assert not verdict.dropped, str(verdict)
