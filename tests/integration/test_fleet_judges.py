"""A judge on generators of the fleet: a real engine with known verdicts scores a run, is measured, and is killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from accounts import assert_accounted_for

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla_testing.minus_judge import RUBRIC, VERDICTS, make_minus_judge, truth
from flotilla_testing.runs import QUICK, example_rows, run_on, written
from flotilla_testing.stack import Stack, accepting_trainer, running_stack, wait_until

pytestmark = pytest.mark.timeout(900)

RESTARTED_WITHIN_S = 300.0
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_minus_judge(tmp_path_factory.mktemp("judge") / "model")


@pytest.fixture(scope="module")
def description(judge: Path, arithmetic: Path) -> dict[str, Any]:
    careful = {"model": str(judge), "kv_cache_gib": 0.25, "max_running_samples": 32, "max_tokens": 32}
    return {
        "name": "judging",
        "model": str(arithmetic / "model"),
        "generator": {"engine": "sim", "sim": {"response_tokens": 3}},
        "trainer": {"replicas": 0},
        "judges": {"careful": careful},
        "ready_timeout_s": 600,
        "restart_budget": 1000,
    }


@pytest.fixture(scope="module")
def stack(description: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("judging")
    with (
        running_stack(description, directory) as running,
        accepting_trainer("trainer", running.file, directory, 0.5),
    ):
        yield running


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Callable[[str, float], Path]:
    """A run that the judge scores, after examples of which so many are labelled with the truth."""

    def described(name: str, right: float) -> Path:
        draw, rows = random.Random(7), []
        for number in range(20):
            response = "".join(draw.choices("0123-", k=3))
            wrong = "no" if truth(response) == "yes" else "yes"
            label = truth(response) if number < 20 * right else wrong
            rows.append({"prompt": f"{number}+3=", "response": response, "label": label})
        (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        term = {
            "name": "minus",
            "reward": {"judge": "careful"},
            "rubric": RUBRIC,
            "verdicts": VERDICTS,
            "agreement": {"examples": str(tmp_path / "labelled.jsonl"), "at_least": 0.9},
        }
        return written(
            tmp_path, run_on(example_rows(arithmetic), name, 2, (4, 16, 6), rewards=[term], **QUICK)
        )

    return described


def test_a_command_without_the_fleet_says_that_the_judge_needs_it(
    description: dict[str, Any], run_file: Callable[[str, float], Path], tmp_path: Path
) -> None:
    file = tmp_path / "idle.yaml"
    file.write_text(json.dumps({**description, "name": "idle", "state_dir": str(tmp_path / "state")}))
    tried = Stack(file, tmp_path / "state" / "idle").flotilla("reward", "test", str(run_file("idle", 1.0)))
    assert tried.code != 0 and "the fleet holds judge careful, and has to run to ask it" in tried.err


def test_a_run_is_scored_by_the_verdicts_of_the_model_that_the_fleet_holds(
    stack: Stack, run_file: Callable[[str, float], Path]
) -> None:
    run = stack.run(run_file("good", 1.0))
    assert run["state"] == "succeeded", run["reason"]
    events = (Path(run["directory"]) / "events.jsonl").read_text()
    assert "the judge of reward minus agrees by 1.000" in events
    samples = stack.ok("samples", run["run_id"], "-n", "100")["samples"]
    assert len(samples) == 100 and {one["reward"] for one in samples} == {0, 1}
    assert {one["response"]: one["reward"] for one in samples} == {
        one["response"]: VERDICTS[truth(one["response"])] for one in samples
    }
    steps = stack.metrics(run)
    assert all(step["reward/error_rate"] == 0 and step["judge/tokens/minus"] > 0 for step in steps)
    assert any(step["judge/cache_hit_ratio/minus"] > 0 for step in steps)
    assert not assert_accounted_for(stack, run["run_id"]).dropped


def test_plans_and_trials_measure_the_judge_through_the_fleet(
    stack: Stack, run_file: Callable[[str, float], Path]
) -> None:
    file = str(run_file("tried", 1.0))
    plan = stack.flotilla("run", "plan", file)
    assert plan.code == 0, plan.err
    assert "judge of minus" in plan.out and "1.000" in plan.out
    tried = stack.flotilla("reward", "test", file, "--response", "4-1", "--response", "41")
    assert tried.code == 0, tried.err
    assert "the judge of minus agrees by 1.000" in tried.err
    refused = stack.flotilla("run", "plan", str(run_file("tried", 0.5)))
    assert refused.code != 0 and "the judge of reward minus agrees by 0.500" in refused.out + refused.err


def test_an_evaluation_starts_the_judge_that_it_asks(
    stack: Stack, run_file: Callable[[str, float], Path], arithmetic: Path
) -> None:
    rows = (arithmetic / "data" / "heldout.jsonl").read_text().splitlines(keepends=True)
    held_out = stack.directory / "held-out.jsonl"
    held_out.write_text("".join(rows[:12]))
    found = stack.flotilla(
        *("eval", str(arithmetic / "model"), str(run_file("held", 1.0)), f"evaluation.data={held_out}"),
        *("--json", "-o", str(stack.directory / "answers.jsonl")),
        timeout_s=RESTARTED_WITHIN_S,
    )
    assert found.code == 0, found.err
    answers = [json.loads(line) for line in (stack.directory / "answers.jsonl").read_text().splitlines()]
    assert found.json["answers"] == len(answers) == 12
    assert {one["response"]: one["reward"] for one in answers} == {
        one["response"]: VERDICTS[truth(one["response"])] for one in answers
    }
    scaled = stack.flotilla("scale", "judge-careful", "2")
    assert scaled.code != 0 and "set judges.careful.replicas in stack.yaml" in scaled.err


def test_a_run_whose_judge_agrees_too_little_draws_no_sample(
    stack: Stack, run_file: Callable[[str, float], Path]
) -> None:
    run = stack.run(run_file("bad", 0.5))
    assert run["state"] == "failed"
    assert "the judge of reward minus agrees with its examples by 0.500" in run["reason"]
    assert stack.metrics(run) == []


def test_a_run_waits_by_name_for_a_judge_that_was_killed_and_loses_no_sample(
    stack: Stack, run_file: Callable[[str, float], Path]
) -> None:
    run = stack.ok("run", "start", str(run_file("killed", 1.0)), "steps=30", "rollout.samples_per_prompt=8")
    wait_until("two steps", lambda: len(stack.metrics(run)) >= 2, 120)
    assert stack.holders(SERVICE_KIND_GENERATOR) == {"generator-0": run["run_id"], "judge-careful": ""}
    shown = stack.ok("ps")["processes"]
    assert "judge-careful" in {one["name"] for one in shown}
    events = Path(run["directory"]) / "events.jsonl"

    def named_while_it_is_away() -> bool:
        # On a fast machine it is back before the run has to wait for it.
        with suppress(OSError, psutil.NoSuchProcess):
            stack.process("judge-careful").kill()
        return "for judge careful" in events.read_text()

    wait_until("the name of the judge", named_while_it_is_away, 120)
    watched = stack.flotilla("run", "watch", run["run_id"], "--json", timeout_s=RESTARTED_WITHIN_S + 300)
    assert watched.json["state"] == "succeeded", watched.json["reason"]
    assert {step["reward/error_rate"] for step in stack.metrics(run)} == {0.0}
    assert not assert_accounted_for(stack, run["run_id"]).dropped
    assert watched.json["policy_version"] == "0.30"
