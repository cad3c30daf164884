"""The whole fleet, end to end, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accounts import assert_accounted_for

from flotilla_testing.runs import example_rows, run_on, small_run, written
from flotilla_testing.stack import Stack, running_stack, wait_until

pytestmark = pytest.mark.timeout(300)

PROMPTS = 16
SAMPLES = 4
CANARY = (
    "weights.canary.prompts=64",
    "weights.canary.tokens=16",
    "weights.canary.temperatures=[1.0, 0.7]",
)


@pytest.fixture(scope="module")
def finished_run(stack: Stack, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Three GRPO steps with the full canary, shared by the tests that only look at the result."""
    run = run_on(
        example_rows(arithmetic),
        "three-steps",
        3,
        (PROMPTS, SAMPLES, 6),
        optimizer={"learning_rate": 1.0e-4, "schedule": "constant"},
        evaluation={"data": str(arithmetic / "data" / "heldout.jsonl"), "max_prompts": PROMPTS},
    )
    run = stack.run(written(tmp_path_factory.mktemp("run"), run), *CANARY)
    assert run["state"] == "succeeded", run["reason"]
    return run


def test_three_grpo_steps_account_for_every_sample(stack: Stack, finished_run: dict) -> None:
    verdict = assert_accounted_for(stack, finished_run["run_id"])
    assert verdict.trained == 3 * PROMPTS * SAMPLES


def test_trainer_and_generator_agree_at_every_sync(stack: Stack, finished_run: dict) -> None:
    steps = stack.metrics(finished_run)
    assert len(steps) == 3
    for step in steps:
        assert step["canary/max"] < 1e-4
        assert step["logprob_diff/max"] < 1e-4


def test_run_directory_holds_everything(finished_run: dict) -> None:
    directory = Path(finished_run["directory"])
    for name in ("run.yaml", "versions.json", "metrics.jsonl", "events.jsonl", "evaluations.jsonl"):
        assert (directory / name).stat().st_size > 0, name
    assert len(list((directory / "samples").glob("step-*.jsonl.zst"))) == 3
    assert (directory / "model" / "model.safetensors").exists()
    assert list((directory / "plots").glob("*.png"))
    assert {path.stem for path in (directory / "logs").glob("*.log")} >= {
        "coordinator",
        "generator-0",
        "trainer",
    }


def test_timeline_shows_one_step_over_four_processes(
    stack: Stack, finished_run: dict, tmp_path: Path
) -> None:
    file = tmp_path / "timeline.json"
    stack.ok("timeline", finished_run["run_id"], "-o", str(file), "--step", "1")
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len({event["pid"] for event in spans}) >= 4
    names = {event["name"] for event in spans}
    assert {"rl.step", "rl.train", "rl.sync", "rl.sample", "rl.reward"} <= names


def test_operators_see_into_services_and_samples(stack: Stack, finished_run: dict, tmp_path: Path) -> None:
    for service in ("coordinator", "trainer"):
        shown = stack.ok("stacks", service)["processes"]
        assert shown[0]["process"] == "main" and "--- thread MainThread" in shown[0]["stacks"]
    profile = tmp_path / "profile.txt"
    stack.ok("profile", "reward-0", "-o", str(profile), "--seconds", "0.2")
    assert profile.read_text().strip()
    assert "exact" in {one["name"] for one in stack.ok("reward", "list")["rewards"]}
    samples = stack.ok("samples", finished_run["run_id"], "--step", "1", "-n", "300")["samples"]
    assert len(samples) == PROMPTS * SAMPLES and {one["state"] for one in samples} == {"durable"}
    assert all(one["prompt"] and one["policy_versions"] and one["reward"] is not None for one in samples)


def test_a_generator_imports_vllm_once(stack: Stack) -> None:
    """The server and the engine are forks: a process that imported vLLM itself would have another command line."""
    service = stack.process("generator-0")
    (server,) = (one for one in service.children() if one.cmdline() == service.cmdline())
    (engine,) = server.children()
    assert engine.cmdline() == service.cmdline() and (server.name(), engine.name()) == (
        "fork server",
        "engine",
    )


def test_second_up_changes_nothing(stack: Stack) -> None:
    before = stack.process("coordinator").pid
    outcome = stack.flotilla("up")
    assert outcome.code == 0
    assert "already running" in outcome.out + outcome.err
    assert stack.process("coordinator").pid == before


def test_staleness_one_overlaps_and_stays_within_the_bound(stack: Stack, run_file: Path) -> None:
    run = stack.run(run_file, "rollout.max_staleness=1", "steps=4")
    assert run["state"] == "succeeded", run["reason"]
    steps = stack.metrics(run)
    assert next(step["staleness/max"] for step in steps) == 0
    assert max(step["staleness/max"] for step in steps) == 1
    assert_accounted_for(stack, run["run_id"])


def test_killed_coordinator_leaves_a_timeline_and_a_fleet_that_goes_on(
    stack: Stack, run_file: Path, tmp_path: Path
) -> None:
    run = stack.ok("run", "start", str(run_file), "steps=100000", "resume=by_user")
    wait_until("the first steps", lambda: len(stack.metrics(run)) >= 3, 60)
    stack.process("coordinator").kill()

    file = tmp_path / "timeline.json"
    stack.ok("timeline", run["run_id"], "-o", str(file))
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"rl.step", "rl.train", "rl.sample"} <= names

    wait_until("the coordinator's return", stack.answers, 60)
    assert stack.ok("run", "show", run["run_id"])["state"] == "failed"
    assert_accounted_for(stack, run["run_id"])
    after = stack.run(run_file)
    assert after["state"] == "succeeded", after["reason"]


def test_a_run_in_bfloat16_starts_however_few_tokens_its_canary_has(arithmetic: Path, tmp_path: Path) -> None:
    """Rounding alone would refuse nearly each of its syncs, if the limit did not know how few tokens there are."""
    description = {
        "name": "rounded",
        "model": str(arithmetic / "model"),
        "trainer": {"dtype": "bfloat16"},
        "generator": {"dtype": "bfloat16", "replicas": 1, "kv_cache_gib": 0.25},
    }
    run_file = small_run(arithmetic, tmp_path / "run.yaml")
    with running_stack(description, tmp_path) as rounded:
        run = rounded.run(run_file, "weights.canary={prompts: 1, tokens: 4}")
        assert run["state"] == "succeeded", run["reason"]
        assert all("canary/mean" in step for step in rounded.metrics(run)[1:])
