"""Names of tasks are read strictly, and a question is of one split for ever."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from flotilla_core import generated_tasks
from flotilla_core.config import DataConfig, EvaluationConfig, RunConfig, load_text
from flotilla_core.errors import InvalidConfig
from flotilla_core.generated_tasks import SPLITS, TaskSource, package_version, packed, split_of, unpacked


@pytest.mark.parametrize(
    ("name", "shown", "kind"),
    [
        ("countdown", "reasoning_gym:countdown?size=500&seed=1", "countdown"),
        (
            "reasoning_gym:countdown?seed=2&level=3&size=9",
            "reasoning_gym:countdown?level=3&size=9&seed=2",
            "countdown?level=3",
        ),
        (
            "countdown?levels=1-3&seed=2",
            "reasoning_gym:countdown?levels=1-3&size=500&seed=2",
            "countdown?levels=1-3",
        ),
        (
            'chain_sum?operators=["+", "-"]&max_terms=2&style=plain',
            'reasoning_gym:chain_sum?max_terms=2&operators=["+", "-"]&style="plain"&size=500&seed=1',
            'chain_sum?max_terms=2&operators=["+", "-"]&style="plain"',
        ),
    ],
)
def test_a_source_has_one_way_to_be_written(name: str, shown: str, kind: str) -> None:
    source = TaskSource.parse(name)
    assert (str(source), source.kind) == (shown, kind)
    assert TaskSource.parse(Path(shown)) == source
    assert TaskSource.parse(kind) == TaskSource.parse(name.replace("seed=2", "").replace("size=9", ""))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("reasoning_gym:", "followed by the name"),
        ("Count down", "followed by the name"),
        ("countdown?size=0", "size is a whole number from 1 to 100,000"),
        ("countdown?seed=4001", "seed is a whole number"),
        ("countdown?size=5&size=6", "second one"),
        ("countdown?size", "no key=value"),
        ("countdown?levels=3", "range such as 0-4"),
        ("countdown?levels=3-1", "range such as 0-4"),
        ("countdown?levels=0-4&level=1", "level and levels"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_when_the_file_is_read(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TaskSource.parse(name)
    with pytest.raises(ValueError, match=why):
        DataConfig(
            train=f"reasoning_gym:{name.removeprefix('reasoning_gym:')}", curriculum={"every_steps": 1}
        )


def test_a_range_is_a_source_for_each_level() -> None:
    levels = TaskSource.parse("countdown?levels=1-3&size=9").by_level
    assert [(one.name, one.size) for one in levels] == [(f"countdown.{level}", 9) for level in (1, 2, 3)]
    assert TaskSource.parse("countdown?level=1").by_level == [TaskSource.parse("countdown?level=1")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"train": "reasoning_gym:countdown?levels=0-2"}, "say in data.curriculum how the level rises"),
        ({"train": "x.jsonl", "curriculum": {"every_steps": 5}}, "no data set has levels"),
        ({"train": "reasoning_gym:a?levels=0-2", "curriculum": {}}, "one of every_steps and reward"),
        (
            {"train": "reasoning_gym:a?levels=0-2", "curriculum": {"every_steps": 5, "reward": 1}},
            "one of every_steps and reward",
        ),
    ],
)
def test_a_curriculum_and_a_range_of_levels_need_each_other(data: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DataConfig(**data)


def test_evaluations_have_one_level_and_the_name_of_their_task() -> None:
    (one,) = EvaluationConfig(data="reasoning_gym:countdown?level=2&size=9").sets_of_data
    assert one.shown == "countdown.2"
    with pytest.raises(ValueError, match="evaluations have one each"):
        EvaluationConfig(data=[{"path": "reasoning_gym:countdown?levels=0-2"}])


def test_levels_rise_by_rewards_where_there_are_rewards() -> None:
    text = "name: x\nsteps: 1\nalgorithm: {type: sft}\ndata: {train: 'reasoning_gym:a?levels=0-1', curriculum: {%s}}\n"
    with pytest.raises(InvalidConfig, match=r"raises levels by rewards, and .* sft generates no"):
        load_text(RunConfig, text % "reward: 0.5")
    assert load_text(RunConfig, text % "every_steps: 5").data.curriculum is not None


def test_names_of_tasks_are_no_paths_of_the_file_that_has_them(tmp_path: Path) -> None:
    config = DataConfig(train=[{"path": "reasoning_gym:countdown"}, {"path": "a.jsonl"}])  # type: ignore[arg-type]
    tasks, file = config.with_paths_from(tmp_path).training_sets
    assert (tasks.path, file.path) == (Path("reasoning_gym:countdown"), tmp_path / "a.jsonl")


def test_one_question_in_eight_is_for_tests_and_one_for_validation() -> None:
    shares = Counter(split_of(f"What is {number} + 1?") for number in range(8000))
    assert set(shares) == set(SPLITS)
    assert 900 < shares["test"] < 1100 and 900 < shares["validation"] < 1100


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, [2.5, None, True], ("x",)), "b": {1: "one", (2, 3): {"$set": 4}}, "c": {1, 2}, "d": {}},
        {"$dict": 1, "e": {"$tuple": [1]}, "f": frozenset({"x"}), "g": float("inf"), "h": 1 << 80},
    ],
)
def test_an_entry_is_unpacked_as_it_was(value: dict[str, Any]) -> None:
    assert unpacked(packed(value, "here")) == value


def test_an_entry_that_a_row_cannot_keep_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="cannot be kept in rows"):
        packed({"a": object()}, "here")


def test_a_host_without_the_package_is_told_the_command_of_its_own_interpreter_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(generated_tasks, "version", version)
    with pytest.raises(InvalidConfig, match=r"reasoning-gym is not installed here") as caught:
        package_version()
    assert f"{sys.executable} -m pip install 'flotilla[reasoning-gym]'" in str(caught.value)
