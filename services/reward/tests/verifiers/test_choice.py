from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_reward.builtin import CannotScore, Judged, Sample
from flotilla_reward.verifiers.choice import Choice

GOLDEN = Path(__file__).parents[1] / "golden" / "choices.jsonl"


def test_choice_judges_as_a_careful_human_does() -> None:
    rows = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    assert len(rows) >= 100
    wrong = [
        row
        for row in rows
        if Choice(**row.get("parameters", {})).score(
            Sample("", row["response"], row["answer"], row.get("info", {}))
        )
        != row["score"]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "choices",
    [
        {"label": ["A", "B"], "text": ["Rome", "Paris"]},
        {"A": "Rome", "B": "Paris"},
        ["Rome", "Paris"],
    ],
)
def test_options_of_a_row_come_in_three_shapes(choices: object) -> None:
    assert Choice().score(Sample("", "It is Paris.", "B", {"choices": choices})) == 1


@pytest.mark.parametrize(
    ("response", "told"), [("It is Paris.", "B"), ("The answer is (a)", "A"), ("I do not know", None)]
)
def test_what_was_read_is_the_label_whatever_named_it(response: str, told: str | None) -> None:
    score = Choice().score(Sample("", response, "B", {"choices": ["Rome", "Paris"]}))
    assert isinstance(score, Judged) and score.extracted == told


def test_an_answer_that_is_no_option_is_no_score() -> None:
    with pytest.raises(CannotScore, match="names none of the options A, B"):
        Choice().score(Sample("", "A", "C", {"choices": ["Rome", "Paris"]}))
