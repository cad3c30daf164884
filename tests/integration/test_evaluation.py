"""Evaluations: a checkpoint is evaluated without its trainer exactly as the run did, with every answer on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_coordinator.records.directory import RunDirectory
from flotilla_data.samples import read_samples
from flotilla_testing.runs import QUICK, run_on, written
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(240)

REWARD = """
def graded(prompt, response, answer, info):
    return len(response) % 7 / 8 if info.get("level") else 2.0 * (len(response) % 2)
"""
SETS = (("easy", 1, 0.0), ("hard", 4, 1.0))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run with two held-out sets: a greedy one, and one of several answers."""
    (tmp_path / "rewards.py").write_text(REWARD)
    sums = [{"prompt": f"{a}+11=", "answer": str(a + 11), "level": a % 2} for a in range(10, 40)]
    for name, rows in (("train", sums[:20]), ("easy", sums[20:25]), ("hard", sums[25:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_on(
        tmp_path / "train.jsonl",
        "evaluated",
        2,
        (2, 2, 12),
        seed=7,
        algorithm={"type": "grpo", "correction": {"fail_at": None}},
        rewards=[{"reward": f"{tmp_path / 'rewards.py'}:graded"}],
        evaluation={
            "every_steps": 1,
            "success_at": 0.5,
            "data": [
                {
                    "path": str(tmp_path / f"{name}.jsonl"),
                    "samples_per_prompt": drawn,
                    "temperature": temperature,
                }
                for name, drawn, temperature in SETS
            ],
        },
        checkpoint={"every_steps": 1, "keep": 1, "best_by": "eval/hard/reward_mean"},
        **QUICK,
    )
    return written(tmp_path, run)


def test_an_evaluation_without_a_trainer_equals_that_of_the_run(
    gangs: Stack, run_file: Path, tmp_path: Path
) -> None:
    run = gangs.run(run_file)
    assert run["state"] == "succeeded", run["reason"]
    directory = RunDirectory(Path(run["directory"]))
    lines = {line["step"]: line for line in directory.read_evaluations()}
    assert set(lines) == {0, 1, 2}
    listed = gangs.ok("checkpoint", "list", run["run_id"])
    best = max((1, 2), key=lambda step: (lines[step]["eval/hard/reward_mean"], -step))
    assert [one["steps_done"] for one in listed["checkpoints"] if one["best"]] == [best]
    assert listed["checkpoints"][-1]["steps_done"] == 2

    output = tmp_path / "answers.jsonl"
    found = gangs.ok("eval", run["run_id"], "-o", str(output))
    assert found["policy_version"] == "0.2"
    own = {name: value for name, value in lines[2].items() if name.startswith("eval/")}
    assert found["metrics"] == {"eval/accuracy": lines[2]["accuracy"], **own}
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    kept = list(read_samples(directory.path, "eval", [2]))
    assert all(verdict.pop("seconds") > 0 for one in (*kept, *answers) for verdict in one["verdicts"])
    assert len(answers) == 5 + 4 * 5 and kept == answers
    assert {answer["set"] for answer in answers} == {"easy", "hard"}
    assert answers[0]["reward_parts"][0]["value"] == answers[0]["reward"]
    earlier = [answer["response"] for answer in read_samples(directory.path, "eval", [1])]
    assert earlier != [answer["response"] for answer in answers]
