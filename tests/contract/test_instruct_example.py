"""The example of instructions: what is held out, and which responses its reward takes for right."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flotilla_testing.scripts import loaded

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "instruct"
FILES = ("train", "heldout", "other-kinds")


@pytest.fixture(scope="module")
def example() -> dict[str, ModuleType]:
    return {name: loaded(EXAMPLE / f"{name}.py") for name in ("make_data", "rewards")}


@pytest.fixture(scope="module")
def rows(
    example: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder in (first, second):
        example["make_data"].make_data(folder, seed=3)
    for name in FILES:
        assert (first / f"{name}.jsonl").read_bytes() == (second / f"{name}.jsonl").read_bytes()
    return {
        name: [json.loads(line) for line in (first / f"{name}.jsonl").read_text().splitlines()]
        for name in FILES
    }


def test_no_topic_of_a_held_out_prompt_is_trained(rows: dict[str, list[dict[str, Any]]]) -> None:
    trained = {row["checks"].get("mentions") for row in rows["train"]} - {None}
    held_out = {row["checks"].get("mentions") for row in (*rows["heldout"], *rows["other-kinds"])} - {None}
    assert len(trained) > 80 and len(held_out) > 20 and not trained & held_out
    texts = {name: {row["prompt"][0]["content"] for row in found} for name, found in rows.items()}
    assert [len(texts[name]) for name in FILES] == [1500, 300, 100]
    assert not texts["train"] & (texts["heldout"] | texts["other-kinds"])
    assert not {row["kind"] for row in rows["train"]} & {row["kind"] for row in rows["other-kinds"]}


@pytest.mark.parametrize(
    ("checks", "right", "wrong"),
    [
        (
            {"mentions": "fox", "whole": True, "most_words": 4},
            "Foxes are quick.",
            "The fox is quick and red.",
        ),
        ({"mentions": "fox", "also_mentions": "keys"}, "A fox has keys.", "A fox has doors."),
        ({"mentions": "fox", "avoids": "is"}, "This fox runs.", "The fox is red."),
        ({"mentions": "fox", "ends_with": "?"}, "Where is the fox?", "The fox sleeps."),
        ({"mentions": "fox", "whole": True}, "The fox sleeps.", "The fox sleeps in the"),
        ({"items": 3}, "1. Oak\n2. Elm\n3. Fir", "Oak, elm, oak"),
        ({"items": 2}, "Oak and elm.", "The trees that I like best are oak, and elm."),
        ({"first_word": "Every"}, "Every fox runs.", "The fox runs."),
        ({"last_number": 12}, "7 and 5 are 12.", "The sum of 12 is 7."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_response_counts_only_where_all_checks_hold(
    example: dict[str, ModuleType], checks: dict[str, Any], right: str, wrong: str
) -> None:
    follows = example["rewards"].follows
    assert follows("", right, "", {"checks": checks}) == 1.0
    assert follows("", wrong, "", {"checks": checks}) == 0.0
    assert follows("", " \n", "", {"checks": checks}) == 0.0
