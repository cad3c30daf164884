"""A run whose teachers nobody starts is refused, by the keys to change."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.checks import role_errors
from flotilla_coordinator.plan.update_lines import algorithm_chapter
from flotilla_core.config import PolicyConfig, RunConfig, StackConfig


def stack_of(**teachers: dict[str, Any]) -> StackConfig:
    return StackConfig.model_validate({"teachers": teachers})


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"type": "distillation"},
            "algorithm.advantage.type is distill, but the stack has no teacher: write `teacher: {replicas: 1}`",
        ),
        ({"type": "distillation", "advantage": {"teachers": {"math": 1, "far": 1}}}, ""),
        (
            {"type": "distillation", "advantage": {"teachers": {"math": 1, "code": 1}}},
            "algorithm.advantage.teachers names code, but the stack has no teachers.code: write "
            "`teachers: {code: {replicas: 1}}`",
        ),
        (
            {"type": "distillation", "advantage": {"teachers": {"idle": 1}}},
            "algorithm.advantage.teachers names idle, but the stack has no teachers.idle: write ",
        ),
        ({"teacher": {}}, "algorithm.teacher is set, but the stack has no teacher: write `teacher: "),
        (
            {"teacher": {"teachers": {"idle": 1}}},
            "algorithm.teacher.teachers names idle, but the stack has no ",
        ),
    ],
)
def test_a_run_whose_teachers_the_stack_does_not_start_is_refused_by_their_keys(
    algorithm: dict[str, Any], said: str
) -> None:
    run = {"name": "r", "steps": 1, "data": {"train": "x"}, "rewards": [{"reward": "exact"}]}
    asking = RunConfig.model_validate({**run, "algorithm": algorithm})
    stack = stack_of(math={"replicas": 1}, far={"attach": "elsewhere:1"}, idle={})
    errors = Chapter.of(role_errors(asking, stack)).errors
    assert [error.startswith(said) for error in errors] == ([True] if said else [])


def test_the_plan_tells_of_the_teachers_and_their_weights() -> None:
    advantage = {"teachers": {"math": 0.7, "code": 0.3}}
    algorithm = PolicyConfig.model_validate({"type": "distillation", "advantage": advantage})
    told = {name: explanation for name, _, explanation in Chapter.of(algorithm_chapter(algorithm)).lines}
    assert told["advantage"] == "coefficient 1, reward_weight 0, teachers math 0.7 and code 0.3"


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        (
            {"divergence": "reverse"},
            "reverse divergence over its 8 likeliest tokens, all others as one more, ",
        ),
        (
            {"tail": False, "teachers": {"math": 1, "code": 1}, "teacher_field": "domain"},
            "forward divergence over its 8 likeliest tokens, coefficient 1; asked: math and code by domain",
        ),
    ],
)
def test_the_plan_tells_what_is_learned_from_the_likeliest_tokens_of_a_teacher(
    teacher: dict[str, Any], told: str
) -> None:
    algorithm = PolicyConfig.model_validate({"teacher": {"top_k": 8, **teacher}})
    lines = {
        name: (value, explanation)
        for name, value, explanation in Chapter.of(algorithm_chapter(algorithm)).lines
    }
    assert lines["teacher"][0] == "in the loss"
    assert lines["teacher"][1].startswith(told)
