"""A plan describes generation ahead of training, and evaluations in parallel with it."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla_coordinator.plan import checks, sampling_lines
from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.gpu_memory import sleeps_in
from flotilla_core.config import RunConfig, StackConfig

TOKENS_OF_A_STEP = 1000


def run(steps: int = 100, **changes: Any) -> RunConfig:
    description = {
        "name": "ahead",
        "steps": steps,
        "data": {"train": "train.jsonl"},
        "rewards": [{"reward": "exact"}],
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 4, "max_staleness": 3},
        "optimizer": {"warmup_updates": 0},
    }
    return RunConfig.model_validate(description | changes)


def warnings(config: RunConfig, memory: int = 1 << 40) -> list[str]:
    return Chapter.of(sampling_lines.asynchrony_warnings(config, TOKENS_OF_A_STEP, memory)).warnings


def test_what_runs_ahead_is_counted() -> None:
    _, value, explanation = sampling_lines.policy_line(run())
    assert value == "max_staleness 3" and "by at most 3 steps" in explanation
    _, value, explanation = sampling_lines.groups_line(run(), TOKENS_OF_A_STEP)
    assert value == "at most 64" and "256 samples" in explanation  # 4 steps x 16 prompts x 4 samples
    assert not warnings(run())


def test_running_further_ahead_than_the_run_is_long_is_a_warning() -> None:
    (warning,) = warnings(run(steps=3))
    assert "max_staleness = 3 admits all 3 steps at once" in warning
    _, value, _ = sampling_lines.groups_line(run(steps=3), TOKENS_OF_A_STEP)
    assert value == "at most 48"


@pytest.mark.parametrize(
    ("algorithm", "warned"),
    [
        ({"type": "grpo"}, False),
        ({"type": "grpo", "correction": {"proximal": "trainer"}}, True),
        ({"type": "grpo", "correction": {"proximal": "interpolated"}}, True),
        ({"type": "gspo"}, True),
        ({"type": "rloo"}, True),
        ({"type": "rloo", "correction": {"importance": "token"}}, False),
        ({"type": "rloo", "correction": {"sequence_high": 1.5}}, False),
        ({"type": "rloo", "correction": {"rejection": [{"measure": "k1", "high": 2.0}]}}, False),
        ({"type": "rloo", "correction": {"sequence_high": 2.0}}, False),
        ({"type": "tis_grpo"}, False),
    ],
)
def test_old_samples_that_nothing_weighs_are_a_warning(algorithm: dict[str, Any], warned: bool) -> None:
    found = warnings(run(algorithm=algorithm))
    assert ["algorithm.correction.importance" in warning for warning in found] == [True] * warned
    on_policy = {"prompts_per_step": 16, "samples_per_prompt": 4, "max_staleness": 0}
    assert not warnings(run(algorithm=algorithm, rollout=on_policy))


def test_more_samples_than_a_quarter_of_the_host_holds_are_a_warning() -> None:
    held = sampling_lines.held_bytes(run(), TOKENS_OF_A_STEP)
    assert not warnings(run(), memory=4 * held)
    (warning,) = warnings(run(), memory=2 * held)
    assert "lower rollout.max_staleness" in warning


def test_only_the_batch_that_is_trained_holds_what_a_teacher_finds_likeliest() -> None:
    plain = sampling_lines.held_bytes(run(), TOKENS_OF_A_STEP)
    taught = sampling_lines.held_bytes(run(algorithm={"teacher": {"top_k": 32}}), TOKENS_OF_A_STEP)
    assert taught - plain == TOKENS_OF_A_STEP * 32 * 8


def test_an_evaluation_beside_the_training_needs_a_second_generator() -> None:
    pinned = {"evaluation": {"data": "heldout.jsonl", "pinned": True}}
    (warning,) = Chapter.of(checks.fleet_warnings(run(**pinned), StackConfig())).warnings
    assert "flotilla scale generator 2" in warning
    two = StackConfig.model_validate({"generator": {"replicas": 2}})
    assert not [*checks.fleet_warnings(run(**pinned), two), *checks.config_errors(run(**pinned))]
    (error,) = Chapter.of(checks.config_errors(run(**pinned, loop="client"))).errors
    assert "with loop: client leave it out" in error


@pytest.mark.parametrize(
    ("changes", "sleep"),
    [
        ({}, True),
        ({"rollout": {"max_staleness": 1}}, True),
        ({"evaluation": {"data": "heldout.jsonl", "pinned": True}}, True),
        ({"rollout": {"generators": 2}}, True),
        ({"rollout": {"generators": 1}}, False),
        ({"loop": "client"}, False),
        ({"algorithm": {"type": "sft"}, "rewards": []}, False),
    ],
)
def test_generators_sleep_in_each_run_that_knows_when_all_of_them_can(
    changes: dict[str, Any], sleep: bool
) -> None:
    described = {"placement": "colocated", "generator": {"replicas": 2}, "trainer": {"nproc": 2}}
    rollout = {"prompts_per_step": 16, "samples_per_prompt": 4} | changes.get("rollout", {})
    config = run(**changes | {"rollout": rollout})
    awake = StackConfig.model_validate(described)
    lend = described | {"generator": {"replicas": 2, "sleep_while_training": True}}
    assert sleeps_in(config, StackConfig.model_validate(lend)) is sleep
    assert not sleeps_in(config, awake)


@pytest.mark.parametrize(
    ("staleness", "weights", "policy", "cost"),
    [
        (0, {}, "recompute", "no sample of the run is under way"),
        # 2 steps x 16 prompts x 4 samples, of which one generator runs 100, each of 10 tokens and half of 256.
        (1, {}, "reuse", "recompute is exact, and computes about 13,800 tokens again"),
        (1, {"kv_policy": "recompute"}, "recompute", "a sync computes about 13,800 tokens again"),
        (1, {"update": "between_samples"}, "drain", "ends its running samples first"),
    ],
)
def test_the_kv_cache_at_a_sync_goes_by_the_staleness_and_says_what_it_costs(
    staleness: int, weights: dict[str, str], policy: str, cost: str
) -> None:
    sizes = {"prompts_per_step": 16, "samples_per_prompt": 4, "sampling": {"max_response_tokens": 256}}
    rollout = sizes | {"max_staleness": staleness}
    stack = StackConfig.model_validate({"model": "/model", "generator": {"max_running_samples": 100}})
    name, value, explanation = sampling_lines.kv_line(run(rollout=rollout, weights=weights), stack, 10)
    assert (name, value) == ("KV cache at a sync", policy) and cost in explanation


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [
        ({"type": "grpo"}, False),
        ({"type": "rloo"}, True),
        ({"type": "rloo", "correction": {"importance": "token"}}, False),
    ],
)
def test_quantized_samples_are_trained_only_with_a_correction(algorithm: Any, refused: bool) -> None:
    config = run(algorithm=algorithm)
    stack = StackConfig.model_validate({"generator": {"quantization": "fp8"}})
    assert not [*sampling_lines.quantization(config, StackConfig())]
    chapter = Chapter.of(sampling_lines.quantization(config, stack))
    ((name, value, explanation),) = chapter.lines
    assert bool(chapter.errors) is refused
    assert all("set algorithm.correction.importance to token" in error for error in chapter.errors)
    assert (name, value) == ("rollout precision", "fp8")
    assert "which algorithm.correction corrects" in explanation
