"""`run plan` against the run itself: what was announced is what happened, at sizes that divide nothing."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.plan import plan_run
from flotilla_core.config import RunConfig, StackConfig, load
from flotilla_testing.runs import QUICK, run_on, written
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(180)

PROMPT_TOKENS = len("10+11=")
ROWS = 23
HELD_OUT = 5
MADE_UP = {"correction": {"fail_at": None}}  # the simulated engine invents its tokens
AWKWARD = [
    # algorithm, steps, prompts, samples, response tokens, budget, evaluate every, checkpoint every, max_staleness
    ("grpo", 1, 1, 2, 1, 1, 0, 0, 0),  # the smallest run, and not even one sequence fits
    ("grpo", 3, 1, 7, 12, 18, 2, 7, 1),  # just one fits
    ("rloo", 2, 29, 2, 3, 61, 1, 1, 0),  # more prompts a step than rows
    ("remax", 3, 5, 1, 7, 61, 0, 2, 1),
    ("lora", 4, 13, 5, 1, 97, 4, 3, 0),
    ("reinforce", 7, 3, 1, 17, 1009, 5, 4, 3),
    ("sft", 7, 3, 1, 4, 31, 3, 2, 0),
    ("sft", 2, 31, 1, 4, 8192, 0, 3, 0),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, first, rows in (("train", 10, ROWS), ("held-out", 60, HELD_OUT)):
        sums = [{"prompt": f"{a}+11=", "answer": str(a + 11)} for a in range(first, first + rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return folder


def description(data: Path, row: tuple[str, int, int, int, int, int, int, int, int]) -> dict[str, Any]:
    algorithm, steps, prompts, samples, response, budget, evaluate, checkpoint, staleness = row
    lora = {"lora": {"rank": 16, "alpha": 32}} if algorithm == "lora" else {}
    held_out = str(data / "held-out.jsonl")
    return run_on(
        data / "train.jsonl",
        "planned",
        steps,
        (prompts, samples, response),
        algorithm={"type": "grpo" if lora else algorithm, **({} if algorithm == "sft" else MADE_UP)},
        **lora,
        rollout={"max_staleness": staleness},
        batching={"tokens_per_microbatch": budget},
        evaluation={"data": held_out, "every_steps": evaluate, "max_response_tokens": 2},
        checkpoint={"every_steps": checkpoint, "keep": 1000},
        optimizer={"schedule": "constant", "warmup_updates": 0},
        **QUICK,
    )


@pytest.mark.parametrize("row", AWKWARD, ids=lambda row: "-".join(map(str, row)))
def test_a_run_is_what_its_plan_says(
    gangs: Stack, data: Path, tmp_path: Path, row: tuple[str, int, int, int, int, int, int, int, int]
) -> None:
    file = written(tmp_path, description(data, row))
    plan = plan_run(load(RunConfig, [file]), load(StackConfig, [gangs.file]))
    assert not plan.errors
    planned = {line.name: line.value for line in plan.lines}

    run = gangs.run(file)
    assert run["state"] == "succeeded", run["reason"]
    rows, directory = gangs.metrics(run), Path(run["directory"])

    assert planned["updates"] == str(len(rows)) == run["policy_version"].removeprefix("0.")
    fed = {f"at most {int(step['microbatches'])} a rank" for step in rows}
    assert fed == {planned["micro-batches of an update"]}
    assert {step["learning_rate"] for step in rows} == {float(planned["learning rate"])}
    greedy = {"reward/greedy_mean" in step for step in rows}
    assert greedy == {"greedy responses" in planned} == {row[0] == "remax"}
    evaluations = (directory / "evaluations.jsonl").read_text().splitlines()
    assert planned["evaluations"] == f"{len(evaluations)} x {HELD_OUT} prompts"
    made = [folder for folder in (directory / "checkpoints").glob("step-*") if folder.is_dir()]
    count, _, size = planned["checkpoints"].partition(" x ")
    assert count == str(len(made))
    for folder in made:
        assert bytes_of(folder) == pytest.approx(shown(size), rel=0.1)
    if row[0] != "sft":
        samples = row[2] * row[3]
        assert planned["step"] == f"{samples} samples"
        tokens = {samples * PROMPT_TOKENS + int(step["tokens/response_total"]) for step in rows}
        assert {f"at most {count:,}" for count in tokens} == {planned["tokens of a step"]}


def test_a_step_draws_no_more_prompts_than_its_plan_says(gangs: Stack, data: Path, tmp_path: Path) -> None:
    run = description(data, ("grpo", 5, 4, 2, 3, 64, 2, 2, 1))
    run["rollout"]["over_issue"] = 0.4
    run["data"]["train"] = [{"path": str(data / f"{name}.jsonl")} for name in ("train", "held-out")]
    run["evaluation"] |= {"samples_per_prompt": 3, "temperature": 1.0}
    file = written(tmp_path, run)
    plan = plan_run(load(RunConfig, [file]), load(StackConfig, [gangs.file]))
    planned = {line.name: line.value for line in plan.lines}
    assert planned["prompts drawn for a step"] == "at most 6"
    assert planned["evaluations"] == f"4 x {HELD_OUT} prompts x 3 samples"

    run = gangs.run(file)
    assert run["state"] == "succeeded", run["reason"]
    ledger = gangs.directory / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(ledger)) as db:
        of_steps = "FROM samples JOIN runs ON runs.key = run WHERE run_id = ? GROUP BY samples.step"
        counted = db.execute(f"SELECT count(DISTINCT grp) {of_steps}", (run["run_id"],))
        assert max(count for (count,) in counted) <= 6
    assert check(ledger, run["run_id"]).passed
    rows, evaluated = gangs.metrics(run), Path(run["directory"]) / "evaluations.jsonl"
    assert sum(row.get("data/share/train", 0) + row.get("data/share/held-out", 0) for row in rows) == 5
    (*_, last) = map(json.loads, evaluated.read_text().splitlines())
    assert {"eval/mean@3", "eval/pass@1", "eval/pass@2"} <= set(last)


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def shown(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]
