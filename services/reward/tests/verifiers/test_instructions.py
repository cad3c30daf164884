from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_reward.builtin import CannotScore, Sample, Unreadable
from flotilla_reward.verifiers.instruction_kinds import KINDS
from flotilla_reward.verifiers.instructions import Instructions

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden" / "instructions.jsonl").read_text().splitlines()
]


def score(response: str, of_row: object, **parameters: object) -> float:
    info = {"instructions": of_row} if of_row else {}
    return Instructions(**parameters).score(Sample("", response, "", info))


def test_instructions_are_judged_as_a_careful_human_does() -> None:
    assert len(ROWS) >= 150
    wrong = [
        row
        for row in ROWS
        if score(row["response"], row.get("instructions"), **row.get("parameters", {})) != row["score"]
    ]
    assert wrong == []


def test_each_kind_has_a_row_that_follows_it_or_not() -> None:
    scores: dict[str, set[float]] = {kind: set() for kind in KINDS}
    for row in ROWS:
        if len(row.get("instructions", [])) == 1:
            scores[row["instructions"][0]["kind"]].add(row["score"])
    assert [kind for kind, seen in scores.items() if seen != {0, 1}] == []


@pytest.mark.parametrize(
    ("instructions", "says"),
    [
        (None, "no instructions in instructions"),
        ("words", "no list of objects"),
        ([{"kind": "wrods", "at_most": 3}], r"no kind of instruction 'wrods' \(did you mean words\?\)"),
        ([{"at_most": 3}], "no kind of instruction None"),
        ([{"kind": "words", "at_mots": 3}], r"unknown parameter at_mots \(did you mean at_most\?\)"),
        ([{"kind": "words", "at_most": "many"}], "at_most: Input should be a valid integer"),
        ([{"kind": "words"}], "words: at_least or at_most is needed"),
        ([{"kind": "title", "text": "x"}], "unknown parameter text; it takes none"),
        ([{"kind": "keywords_present"}], "keywords: Field required"),
        ([{"kind": "script", "script": "runes"}], "script: Input should be 'arabic'"),
    ],
)
def test_a_wrong_instruction_is_no_score_and_says_what_is_meant(instructions: object, says: str) -> None:
    with pytest.raises(CannotScore, match=says):
        score("Hello.", instructions)


def test_wrong_instructions_as_parameters_are_refused_before_any_response() -> None:
    with pytest.raises(ValueError, match="did you mean words"):
        Instructions(instructions=[{"kind": "wrods"}])


def test_json_nested_beyond_reading_is_the_responses_fault() -> None:
    with pytest.raises(Unreadable):
        score("[" * 100_000, [{"kind": "json_only"}])


def test_every_kind_and_parameter_is_documented() -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text()
    names = {*KINDS, *(name for kind in KINDS.values() for name in kind.__annotations__)} - {"text", "return"}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
