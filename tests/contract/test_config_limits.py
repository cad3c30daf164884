"""Every number of the configuration has both bounds, written in the schema, and takes nothing but such a number.

A number without bounds is a fault: give the key `Field(ge=..., le=...)`, wide enough for real work (contexts of 1M
tokens, steps of 100k samples, ten million steps) and too narrow for a slip of some digits. For the items of a tuple the
bounds stand in `Annotated[float, Field(ge=..., le=...)]`, and its length in `Field(max_length=...)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pydantic import ValidationError

from flotilla_core.config import ConfigModel, RunConfig, StackConfig, json_schema, load_text
from flotilla_core.config.judges import LONGEST_RUBRIC
from flotilla_core.config.model import UserFunction
from flotilla_core.config.rewards import RewardTermConfig
from flotilla_core.errors import InvalidConfig

NUMBERS = ("integer", "number")
MAPPED = "patternProperties"
"""What a mapping of names of the user's holds."""


def sections(model: type[ConfigModel] = ConfigModel) -> Iterator[type[ConfigModel]]:
    for below in model.__subclasses__():
        if below.__module__.startswith("flotilla_core.config."):
            yield below
            yield from sections(below)


SECTIONS = sorted(set(sections()), key=lambda section: section.__name__)


@cache
def schema_of(section: type[ConfigModel]) -> dict[str, Any]:
    return section.model_json_schema()


def parts(schema: dict[str, Any], *, deep: bool) -> Iterator[dict[str, Any]]:
    """A schema and those that it is made of; `deep` goes into items, other sections never."""
    if "$ref" in schema:
        return
    yield schema
    below = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if deep:
        below += schema.get("prefixItems", [])
        below += [schema["items"]] if isinstance(schema.get("items"), dict) else []
        below += schema.get(MAPPED, {}).values()
    for each in below:
        yield from parts(each, deep=deep)


def keys(kind: str, *, deep: bool = True) -> list[tuple[type[ConfigModel], str, dict[str, Any]]]:
    found = []
    for section in SECTIONS:
        for name, written in schema_of(section).get("properties", {}).items():
            for part in parts(written, deep=deep):
                if part.get("type") == kind and "const" not in part and "enum" not in part:
                    found.append((section, name, part))
    return found


NUMERIC = [key for kind in NUMBERS for key in keys(kind)]


def named(found: list[tuple[type[ConfigModel], str, dict[str, Any]]]) -> list[str]:
    return [f"{section.__name__}.{name}" for section, name, _ in found]


def problems_of(section: type[ConfigModel], name: str, value: Any) -> list[str]:
    """What validation says against a value of one key; absent ones and rules over several keys are left out."""
    try:
        section.model_validate({name: value})
    except ValidationError as refused:
        return [
            str(error["msg"])
            for error in refused.errors()
            if error["loc"][:1] == (name,) and error["type"] != "missing"
        ]
    return []


def test_the_walk_finds_the_keys_that_everybody_sets() -> None:
    found = set(named(NUMERIC))
    assert {
        "RunConfig.steps",
        "OptimizerConfig.betas",
        "SamplingConfig.temperature",
        "GangConfig.replicas",
    } <= found
    assert len(found) > 100


@pytest.mark.parametrize(("section", "name", "schema"), NUMERIC, ids=named(NUMERIC))
def test_a_number_has_both_bounds_in_the_schema(
    section: type[ConfigModel], name: str, schema: dict[str, Any]
) -> None:
    low = schema.keys() & {"minimum", "exclusiveMinimum"}
    high = schema.keys() & {"maximum", "exclusiveMaximum"}
    assert low and high, f"{section.__name__}.{name} lacks a bound: write Field(ge=..., le=...)"
    assert schema.get("maximum", 0) < 2**63


WRONG_NUMBERS = (
    True,
    float("nan"),
    float("inf"),
    -float("inf"),
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    "1",
    1e308,
)


@pytest.mark.parametrize(("section", "name", "schema"), NUMERIC, ids=named(NUMERIC))
def test_a_number_takes_nothing_but_a_number_within_its_bounds(
    section: type[ConfigModel], name: str, schema: dict[str, Any]
) -> None:
    whole = schema_of(section)["properties"][name]
    alone = any(part.get("type") in NUMBERS for part in parts(whole, deep=False))
    taken = [
        wrong
        for wrong in WRONG_NUMBERS
        if not problems_of(
            section, name, wrong if alone else {"a": wrong} if MAPPED in whole else [wrong, wrong]
        )
    ]
    assert not taken, f"{section.__name__}.{name} takes {taken}"


@pytest.mark.parametrize(("section", "name", "schema"), keys("boolean"), ids=named(keys("boolean")))
def test_a_truth_value_takes_no_number_and_no_text(
    section: type[ConfigModel], name: str, schema: dict[str, Any]
) -> None:
    for wrong in (1, 0, 1.0, "true", "yes"):
        assert problems_of(section, name, wrong), f"{section.__name__}.{name} takes {wrong!r}"


@pytest.mark.parametrize(("section", "name", "schema"), keys("array"), ids=named(keys("array")))
def test_a_list_has_a_longest_length(section: type[ConfigModel], name: str, schema: dict[str, Any]) -> None:
    assert "maxItems" in schema, f"{section.__name__}.{name} lacks Field(max_length=...)"
    assert schema["maxItems"] <= 1000


MAPPINGS = [found for found in keys("object") if MAPPED in found[2]]


@pytest.mark.parametrize(("section", "name", "schema"), MAPPINGS, ids=named(MAPPINGS))
def test_a_mapping_has_a_most_of_names(section: type[ConfigModel], name: str, schema: dict[str, Any]) -> None:
    assert "maxProperties" in schema, f"{section.__name__}.{name} lacks Field(max_length=...)"
    assert schema["maxProperties"] <= 1000


LONG_TEXTS = {"rubric": LONGEST_RUBRIC}
"""The keys whose text may be that of a file."""


@pytest.mark.parametrize(("section", "name", "schema"), keys("string"), ids=named(keys("string")))
def test_a_text_has_a_longest_length(section: type[ConfigModel], name: str, schema: dict[str, Any]) -> None:
    whole = schema_of(section)["properties"][name]
    alone = any(part.get("type") == "string" for part in parts(whole, deep=False))
    text = "a" * (LONG_TEXTS.get(name, 4096) + 1)
    assert problems_of(section, name, text if alone else [text])


PARAMETERS = [RewardTermConfig, *(section for section in SECTIONS if issubclass(section, UserFunction))]


@pytest.mark.parametrize("section", PARAMETERS, ids=[section.__name__ for section in PARAMETERS])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), "k is nan, not a finite number"),
        ([1.0, float("inf")], r"k\[1\] is inf, not a finite number"),
        (2**53 + 1, r"k is beyond 2\^53"),
        ({"a": {"b": -(2**63)}}, r"k\.a\.b is beyond 2\^53"),
        ({1: 2}, "k has a key that is no text"),
        (b"raw", "k is a bytes"),
    ],
    ids=["NaN", "inf", "2^53+1", "-2^63", "key", "bytes"],
)
def test_parameters_are_what_the_wire_can_carry(section: type[ConfigModel], value: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        section.model_validate({"parameters": {"k": value}})


RUN = "name: run\nsteps: 5\ndata: {train: a.jsonl}\nrewards: [{reward: exact}]\n"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("steps=true", "steps: expected a valid integer, got the truth value true"),
        ("steps=9223372036854775808", "steps: expected"),
        ("steps='20'", "steps: expected a valid integer, got the text '20'"),
        ("rollout.prompts_per_step=1000000000", "less than or equal to 100000, got the number 1000000000"),
        ("rollout.sampling.temperature=1e308", "less than or equal to 100"),
        ("rollout.sampling.temperature=.nan", "finite number"),
        ("optimizer.learning_rate=1000", "less than or equal to 1"),
        ("optimizer.learning_rate=.inf", "finite number"),
        ("export_final=1", "export_final: expected true or false, got the number 1"),
        ("rewards.0.parameters.a=.nan", "rewards[0].parameters: a is nan, not a finite number"),
        ("algorithm.loss.clip_high=1e400", "finite number"),
    ],
)
def test_an_override_is_refused_as_a_value_of_a_file_is(override: str, told: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load_text(RunConfig, RUN, overrides=[override])
    assert told in str(refused.value)
    assert f"override {override}" in str(refused.value)


def test_bounds_leave_room_for_real_work() -> None:
    config = load_text(
        RunConfig,
        RUN,
        overrides=[
            "steps=10000000",
            "rollout.prompts_per_step=12500",
            "rollout.samples_per_prompt=8",
            "rollout.sampling.max_response_tokens=1048576",
            "data.max_prompt_tokens=1048576",
            "batching.tokens_per_microbatch=1048576",
            "optimizer.learning_rate=1.0",
            "seed=9223372036854775807",
        ],
    )
    assert config.steps == 10_000_000
    stack = load_text(StackConfig, "generator: {replicas: 64, max_model_tokens: 2097152}")
    assert stack.generator.replicas == 64


@pytest.mark.parametrize("model", [RunConfig, StackConfig])
def test_the_published_schema_shows_the_bounds(model: type[ConfigModel]) -> None:
    definitions = json_schema(model)["$defs"]
    if model is RunConfig:
        assert definitions["SamplingConfig"]["properties"]["temperature"]["maximum"] == 100
    else:
        assert definitions["GeneratorConfig"]["properties"]["replicas"]["maximum"] == 256


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            f"data.train={'a' * 300}.jsonl",
            "data.train: the path has a name of 306 bytes, and 255 is the limit",
        ),
        ("initial_weights=~no-such-user/model", "~no-such-user in the path has no home directory"),
        (f"rewards.0.reward={'a' * 300}.py:f", "rewards[0].reward: the path has a name of 303 bytes"),
        (f"algorithm.loss.type=/tmp/{'a' * 300}.py:f", "the path has a name of 303 bytes"),
    ],
    ids=["data", "home", "reward", "loss"],
)
def test_a_path_that_no_file_system_has_is_refused(override: str, told: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load_text(RunConfig, RUN, overrides=[override], resolve_paths=True)
    assert told in str(refused.value)
