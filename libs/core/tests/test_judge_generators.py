"""Judges that the fleet holds: their generators have names, and read a stack in which the judge is the only model."""

from __future__ import annotations

import pytest

from flotilla_core.config import (
    EngineConfig,
    FleetJudgeConfig,
    JudgeConfig,
    StackConfig,
    dump_yaml,
    load_text,
)
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.gangs import model_of, model_roles, started, with_model
from flotilla_core.judge_generators import judge_roles, read_by, section_of_generator, slots_of_judge
from flotilla_core.roles import holds_judge, section_of

TWO = """
model: models/policy
generator: {dtype: float32, replicas: 3}
judges:
  careful: {model: models/judge, replicas: 2, dtype: bfloat16, kv_cache_gib: 2}
  far: {url: "https://h/v1", model: big}
"""


@pytest.fixture
def stack() -> StackConfig:
    return load_text(StackConfig, TWO)


def test_a_judge_with_a_url_is_an_endpoint_and_one_without_is_of_the_fleet(stack: StackConfig) -> None:
    assert isinstance(stack.judges["far"], JudgeConfig)
    assert isinstance(stack.judges["careful"], FleetJudgeConfig)
    assert load_text(StackConfig, dump_yaml(stack)) == stack
    assert judge_roles(stack) == ("judge-careful",) and section_of("judge-careful") == "judges.careful"
    assert slots_of_judge(stack, "judge-careful") == ["judge-careful-0", "judge-careful-1"]


def test_one_generator_of_a_judge_has_its_name_without_a_number() -> None:
    stack = load_text(StackConfig, "judges: {careful: {model: m/j}}")
    assert slots_of_judge(stack, "judge-careful") == ["judge-careful"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            "model: m, request: {a: 1}",
            "judges.c.request: a judge with a url and one without have different keys",
        ),
        ("model: m, api_key_env: KEY", "judges.c.api_key_env: a judge with a url and one without"),
        (
            "url: 'https://h/v1', model: m, replicas: 1",
            "judges.c.replicas: a judge with a url and one without",
        ),
        ("replicas: 1", "judges.c.model is missing"),
        ("model: m, repicas: 2", "did you mean judges.c.replicas"),
    ],
)
def test_keys_of_the_other_kind_of_judge_are_refused_by_name(keys: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        load_text(StackConfig, f"judges: {{c: {{{keys}}}}}")


def test_a_process_with_a_judge_reads_the_section_and_the_model_of_its_judge(stack: StackConfig) -> None:
    read = read_by(stack, "judge-careful-1")
    assert (read.model, read.generator.dtype, read.generator.kv_cache_gib) == ("models/judge", "bfloat16", 2)
    assert read_by(stack, "generator-0") is stack
    assert section_of_generator(stack, "generator-0") is stack.generator
    with pytest.raises(FailedPrecondition, match="the fleet holds no judge 'far'"):
        read_by(stack, "judge-far")


def test_every_key_of_an_engine_reaches_the_process_that_holds_the_judge() -> None:
    keys = {
        "replicas": 2,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "tensor_parallel_size": 2,
        "max_model_tokens": 100,
        "max_running_samples": 3,
        "memory_fraction": 0.5,
        "kv_cache_gib": 1.5,
        "enforce_eager": True,
        "engine_options": {"block_size": 32},
        "environment": {"A": "b"},
    }
    assert keys.keys() == EngineConfig.model_fields.keys()
    stack = StackConfig.model_validate({"judges": {"j": {"model": "m/j", **keys}}})
    read = read_by(stack, "judge-j").generator
    assert {key: getattr(read, key) for key in keys} == keys


def test_names_say_who_holds_a_judge() -> None:
    assert holds_judge("judge-careful") and holds_judge("judge-careful-0")
    assert not any(map(holds_judge, ("generator-0", "judge", "reward_model-judge", "trainer")))


def test_the_model_of_a_judge_is_offered_and_replaced_like_those_of_gangs(stack: StackConfig) -> None:
    assert model_roles(stack)[-1] == "judge-careful" and started(stack, "judge-careful")
    changed = with_model(stack, "judge-careful", "/copies/judge")
    assert model_of(changed, "judge-careful") == "/copies/judge" and changed.model == stack.model
