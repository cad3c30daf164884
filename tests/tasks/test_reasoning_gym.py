"""Each task of reasoning_gym: a row of it is made, kept as text, and scored by the built-in reward.

`make test-tasks` installs the package into an environment of its own; without it, these tests are skipped. All rows
are made once, by one process of the kind that makes them for runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_core.config import DataConfig
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.generated_tasks import COLUMN, SPLITS, TaskSource, data_set, generated_rows, unpacked
from flotilla_data.rows import open_rows
from flotilla_data.tokenizer import Tokenizer
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_reward.builtin import CannotScore, Sample
from flotilla_reward.tasks import ReasoningGym, evaluated
from flotilla_testing.model_folders import write_tokenizer
from flotilla_workers.jail.jail import Jail, find
from flotilla_workers.jail.level import Level

pytest.importorskip("reasoning_gym", reason="reasoning_gym is not installed: make test-tasks")
pytestmark = pytest.mark.timeout(300)

TASKS = sorted({*importlib.import_module("reasoning_gym").factory.DATASETS} - {"composite"})
NO_GOLD = ("boxnet", "rush_hour")
"""The package has neither an answer to these nor a solver."""
FROM_METADATA = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""Tasks whose items have an answer of several, but not as their `answer`."""
MAKE = """
import json, sys
from contextlib import redirect_stdout
from flotilla_core.generated_tasks import TaskSource, generated_rows
for task in sys.argv[1:]:
    with redirect_stdout(sys.stderr):  # the programs of bf print
        row = next(generated_rows(TaskSource.parse(task), "train"))
    print(json.dumps(row))
"""
REFUSED_LEVELS = {
    "caesar_cipher": {2, 3},
    "knight_swap": {0, 1, 2, 3, 4},
    "modulo_grid": {1},
    "rubiks_cube": {4},
    "survo": {2, 3},
}
"""Levels of curricula that the package's own configurations refuse."""
REWARD = ReasoningGym()


def made(*tasks: str, hash_seed: str = "0") -> dict[str, dict[str, Any]]:
    """Return the first row of each task, as a process makes it; of texts its sets have an order of their own."""
    process = subprocess.run(
        [sys.executable, "-c", MAKE, *tasks],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=True,
        text=True,
    )
    return dict(zip(tasks, map(json.loads, process.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    REWARD.prepare()
    return made(*TASKS)


def score(row: dict[str, Any], response: str, reward: ReasoningGym = REWARD) -> float:
    return reward.score(Sample(row["prompt"], response, row["answer"], {COLUMN: row[COLUMN]}))


def gold(task: str, row: dict[str, Any]) -> str:
    entry = unpacked(row[COLUMN]["entry"])
    return FROM_METADATA[task](entry["metadata"]) if task in FROM_METADATA else row["answer"]


def mutated(answer: str) -> str:
    """Return another answer: with other digits, or else without its first half."""
    other = "".join(str((int(sign) + 1) % 10) if sign.isdecimal() else sign for sign in answer)
    return other if other != answer else answer[(len(answer) + 1) // 2 :]


def test_all_tasks_of_the_package_are_here() -> None:
    assert len(TASKS) >= 105 and {*NO_GOLD, *FROM_METADATA} < {*TASKS}


@pytest.mark.parametrize("task", [task for task in TASKS if task not in NO_GOLD])
def test_the_right_answer_of_a_task_is_worth_1_and_another_one_less(
    task: str, rows: dict[str, dict[str, Any]]
) -> None:
    right = gold(task, rows[task])
    assert score(rows[task], f"I think.\n<answer>{right}</answer>") == 1.0
    assert score(rows[task], f"<answer>{mutated(right)}</answer>") < 1.0
    assert score(rows[task], f"<answer>{right}</answer>") == 1.0, "no score changes what the next one sees"


@pytest.mark.parametrize("task", TASKS)
def test_no_answer_and_answers_that_mean_harm_are_worth_less(
    task: str, rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    harm = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for response in (
        "",
        "no tags",
        "<answer></answer>",
        f"<answer>{harm}</answer>",
        f"<answer>[{harm}]</answer>",
    ):
        try:
            assert score(rows[task], response) < 1.0
        except Exception as error:  # noqa: BLE001 - counted as the response's fault
            assert type(error).__name__ == "Unreadable"
    assert not mark.exists()


def test_an_answer_stands_between_the_last_tags() -> None:
    assert REWARD.answer("<answer>1</answer> no, <answer> 2\n</answer>.") == "2"
    assert REWARD.answer("<answer>1 <answer>2</answer></answer") == "2"
    assert REWARD.answer("</answer>2<answer>") is None
    assert ReasoningGym(tag="result").answer("<answer>1</answer><result>2</result>") == "2"
    assert ReasoningGym(tag="").answer(" 2 ") == "2"


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("2*(3+4)/7", 2.0),
        ("['a', 'b']", ["a", "b"]),
        ("max(3, -4) ** 2", 9),
        ("{1: (True, None)}", {1: (True, None)}),
    ],
)
def test_formulas_and_literals_of_answers_are_evaluated(code: str, value: object) -> None:
    assert evaluated(code) == value


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os')",
        "open('/etc/passwd')",
        "exec('1')",
        "().__class__",
        "(lambda: 1)()",
        "[print(1) for x in 'a']",
        "f'{1}'",
        "getattr(1, 'real')",
    ],
)
def test_nothing_else_of_answers_is_evaluated(code: str) -> None:
    with pytest.raises(ValueError, match="a formula or a literal"):
        evaluated(code)


def test_rows_are_the_same_in_every_process(rows: dict[str, dict[str, Any]]) -> None:
    quick = [task for task in TASKS if task not in ("futoshiki", "knight_swap")]
    assert made(*quick) == {task: rows[task] for task in quick}


def test_a_row_can_be_made_again_from_what_it_names(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["countdown"][COLUMN]
    tasks = data_set(TaskSource.parse(row["task"]), row["seed"])
    assert tasks[row["index"]]["question"] == rows["countdown"]["prompt"]


def test_splits_share_no_question_whatever_seed_size_and_level(tmp_path: Path) -> None:
    questions: dict[str, set[str]] = {split: set() for split in SPLITS}
    for query in ("size=60", "size=90&seed=2", "size=40&level=1"):
        for split in SPLITS:
            rows = open_rows(Path(f"reasoning_gym:chain_sum?{query}"), split, tmp_path)
            found = {row.values["prompt"] for row in rows.read(range(len(rows)))}
            assert len(found) == len(rows) == TaskSource.parse(f"chain_sum?{query}").size
            questions[split] |= found
    assert len(set().union(*questions.values())) == sum(map(len, questions.values()))
    assert len(list(tmp_path.glob("*.jsonl"))) == 9


def test_another_seed_makes_other_rows_and_a_larger_size_begins_with_the_same_ones() -> None:
    def prompts(query: str) -> list[str]:
        return [
            row["prompt"] for row in generated_rows(TaskSource.parse(f"base_conversion?{query}"), "train")
        ]

    assert prompts("size=40")[:10] == prompts("size=10")
    assert not {*prompts("size=10")} & {*prompts("size=10&seed=2")}


@pytest.mark.parametrize(
    ("query", "split", "why"),
    [
        ("chainsum", "train", "did you mean chain_sum"),
        ("chain_sum?terms=3", "train", "unexpected keyword argument 'terms'"),
        ("chain_sum?min_terms=5&max_terms=2", "train", "max_terms"),
        ("chain_sum?level=90", "train", "curriculum has the levels 0 to"),
        ("chain_sum", "other", "tasks have no split 'other'"),
        ("chain_sum?max_terms=2&max_digits=1&size=100", "test", "too few different questions"),
    ],
)
def test_what_cannot_be_made_is_refused_with_its_reason(
    query: str, split: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=why):
        open_rows(Path(f"reasoning_gym:{query}"), split, tmp_path)
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("task", TASKS)
def test_every_level_of_a_curriculum_is_a_task_or_refused_by_the_package(task: str) -> None:
    factory = importlib.import_module("reasoning_gym").factory
    try:
        attributes = factory.create_curriculum(task).attributes.values()
    except ValueError:
        pytest.skip("the task has no curriculum")
    refused = set()
    for level in range(max(len(attribute.levels) for attribute in attributes)):
        try:
            assert data_set(TaskSource.parse(f"{task}?level={level}")).config
        except InvalidConfig as error:
            assert "cannot be made like this" in str(error)
            refused.add(level)
    assert refused == REFUSED_LEVELS.get(task, set())


@pytest.fixture
def another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What says of the package that it is another release, here and in new processes."""
    folder = tmp_path / "release"
    (folder / "reasoning_gym-9.9.dist-info").mkdir(parents=True)
    named = "Metadata-Version: 2.1\nName: reasoning-gym\nVersion: 9.9\n"
    (folder / "reasoning_gym-9.9.dist-info" / "METADATA").write_text(named)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert importlib.metadata.version("reasoning-gym") == "9.9"
    yield


def test_another_release_of_the_package_scores_no_older_row(
    rows: dict[str, dict[str, Any]], another_release: None
) -> None:
    with pytest.raises(CannotScore, match=r"the row is of reasoning-gym 0\.1.* here is 9\.9"):
        score(rows["countdown"], "<answer>1</answer>")


def test_another_release_of_the_package_refuses_a_resume_and_names_both(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model", ["?", "<eos>"], eos_token="<eos>"))
    config = DataConfig(train=Path("reasoning_gym:chain_sum?size=8"))
    source = PromptSource(config, tokenizer, seed=1)
    source.next()
    PromptSource(config, tokenizer, seed=1).restore(source.cursor)
    request.getfixturevalue("another_release")
    both = r"chain_sum\?size=8 of reasoning-gym 0\.1\S+, reasoning_gym:chain_sum\?size=8 of reasoning-gym 9\.9 changed"
    with pytest.raises(FailedPrecondition, match=both):
        PromptSource(config, tokenizer, seed=1).restore(source.cursor)


def scored_item(name: str, row: dict[str, Any], response: str) -> pb.ScoreItem:
    made = pb.ScoreItem(sample_id=name, prompt=row["prompt"], response=response, answer=row["answer"])
    made.info.update({COLUMN: row[COLUMN]})
    return made


async def test_the_reward_runs_in_workers_of_its_run_in_the_jail(rows: dict[str, dict[str, Any]]) -> None:
    if not (jail := find()).level:
        pytest.skip(f"this host has no jail: {jail.why_not_higher}")
    pool = Workers(1, find)
    await pool.start()
    try:
        specs = [pb.RewardSpec(reward="reasoning_gym")]
        terms = scoring.resolve(specs)
        async for _ in scoring.load(terms, pool, "run-1"):
            pass
        assert any("flotilla_reward.table of run run-1" in worker for worker in pool.pids)
        row = rows["countdown"]
        right = f"<answer>{row['answer']}</answer>"
        items = [scored_item("right", row, right), scored_item("harm", row, "<answer>().__class__</answer>")]
        items.append(scored_item("endless", row, "<answer>9**9**9**9</answer>"))
        terms = [replace(term, timeout_s=3.0) for term in terms]
        outcomes: dict[str, pb.ScoreOutcome] = {}
        async for response in scoring.score_items(items, terms, pool, scoring.Run("run-1")):
            outcomes |= {outcome.sample_id: outcome for outcome in response.outcomes}
    finally:
        await pool.stop()
    values = {name: outcome.value.components[0] for name, outcome in outcomes.items()}
    assert values["right"].value == 1.0 and values["harm"].value < 0.1
    assert values["endless"].value < 0.1
    assert (values["right"].extracted, values["right"].parts) == (row["answer"], [])
    assert f"reasoning-gym {importlib.metadata.version('reasoning-gym')}" in values["right"].version


async def test_without_a_jail_the_reward_is_refused(rows: dict[str, dict[str, Any]]) -> None:
    pool = Workers(0, lambda: Jail(Level.NONE, refusal="this host has no jail"))
    await pool.start()
    with pytest.raises(InvalidConfig, match="this host has no jail"):
        async for _ in scoring.load(scoring.resolve([pb.RewardSpec(reward="reasoning_gym")]), pool):
            pass
    await pool.stop()
