from __future__ import annotations

import random
import time

import pytest
from pydantic import ValidationError

from flotilla_reward.builtin import CannotScore, Sample, Unreadable
from flotilla_reward.table import BUILTIN
from flotilla_reward.verifiers.instruction_kinds import KINDS
from flotilla_reward.verifiers.text import Length, Regex, Repetition


@pytest.mark.parametrize(
    ("answer", "info", "parameters", "expected"),
    [
        ("", {}, {"pattern": r"\d+"}, 1),
        (r"x = \d+", {}, {}, 1),
        (r"y = \d+", {}, {}, 0),
        ("12", {"pattern": r"x = (\d+)"}, {"group": 1}, 1),
        ("13", {"pattern": r"x = (\d+)"}, {"group": 1}, 0),
        ("", {"pattern": r"\d+"}, {"match": "whole"}, 0),
        (r"\d", {"pattern": "y"}, {}, 0),
    ],
)
def test_a_pattern_comes_from_parameters_or_the_row(
    answer: str, info: dict, parameters: dict, expected: float
) -> None:
    assert Regex(**parameters).score(Sample("", "x = 12;", answer, info)) == expected


@pytest.mark.parametrize(
    ("answer", "parameters", "says"),
    [
        ("", {}, "there is no pattern"),
        ("(", {}, "is not a regular expression"),
        ("12", {"group": 1}, "there is no pattern"),
    ],
)
def test_a_row_without_a_usable_pattern_is_no_score(answer: str, parameters: dict, says: str) -> None:
    with pytest.raises(CannotScore, match=says):
        Regex(**parameters).score(Sample("", "x", answer, {}))


@pytest.mark.parametrize(
    ("response", "parameters", "expected"),
    [
        ("one two three", {"at_most": 3}, 1),
        ("one two three four", {"at_most": 3}, 0),
        ("one two three four", {"at_most": 3, "margin": 4}, 0.75),
        ("one two three four", {"at_most": 3, "margin": 1}, 0),
        ("one", {"at_least": 3, "margin": 4}, 0.5),
        ("", {"at_least": 1}, 0),
        ("don't - stop", {"at_most": 2, "at_least": 2}, 1),
        ("abc", {"unit": "characters", "at_most": 3}, 1),
        (" a\u200bbc\n", {"unit": "characters", "at_most": 3}, 1),
        ("我喜欢", {"at_least": 3, "at_most": 3}, 1),
        ("बारिश है", {"at_least": 2, "at_most": 2}, 1),
    ],
)
def test_length_falls_by_the_distance_from_its_bounds(
    response: str, parameters: dict, expected: float
) -> None:
    assert Length(**parameters).score(Sample("", response, "", {})) == expected


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"unit": "tokens", "at_most": 3}, "tokens are not counted"),
        ({}, "at_least or at_most is needed"),
        ({"at_least": 3, "at_most": 2}, "at_most is below at_least"),
    ],
)
def test_bounds_of_length_that_make_no_sense_are_refused(parameters: dict, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Length(**parameters)


@pytest.mark.parametrize(
    ("response", "parameters", "expected"),
    [
        ("one two three four", {}, 1),
        ("", {}, 1),
        ("one", {}, 1),
        ("la la la la la", {}, 1 / 3),
        ("a b a b", {"n": 2}, 2 / 3),
        ("A b, a B.", {"n": 2}, 2 / 3),
        ("aaaa", {"n": 1, "unit": "characters"}, 1 / 4),
    ],
)
def test_repetition_is_the_share_of_ngrams_that_are_new(
    response: str, parameters: dict, expected: float
) -> None:
    assert Repetition(**parameters).score(Sample("", response, "", {})) == pytest.approx(expected)


ONE_OF_EACH: dict[str, dict] = {
    "keywords": {"keywords": ["a b", "answer"]},
    "keyword": {"keyword": "a b"},
    "letter": {"letter": "a"},
    "options": {"options": ["a"]},
    "phrase": {"phrase": "a"},
    "characters": {"characters": "!"},
    "marker": {"marker": "P.S."},
    "prompt": {"prompt": "a"},
    "script": {"script": "latin"},
    "paragraph": {"paragraph": 2, "word": "a"},
    "at_least": {"at_least": 1},
}
UNITS = [
    "answer is ",
    "a ",
    "(A) ",
    "the answer ",
    "[",
    "*",
    "**a",
    "<<",
    ".",
    '?!"',
    "\n",
    " \n",
    "`",
    "```\n",
]
UNITS += [
    "- ",
    "\u0301\u0323",
    "\u200b",
    "Ａ",
    "[a",
    "\\boxed{",
    "P.S. ",
    "A or ",
    "not ",
    "|-",
    "1.",
    "I",
    ",\u202e",
    "\ud800",
]


def instructions() -> list[dict]:
    kinds = []
    for name, kind in KINDS.items():
        taken = (kind.__kwdefaults__ or {}).keys() | kind.__annotations__.keys()
        kinds.append(
            {"kind": name}
            | {k: v for key in ONE_OF_EACH if key in taken for k, v in ONE_OF_EACH[key].items()}
        )
    return kinds


@pytest.mark.parametrize("name", ["choice", "f1", "exact_list", "length", "repetition", "instructions"])
def test_verifiers_inside_the_service_take_linear_time_whatever_the_text(name: str) -> None:
    parameters = {"length": {"at_most": 9}, "instructions": {"instructions": instructions()}}.get(name, {})
    reward = BUILTIN[name](**parameters)
    assert reward.bounded
    slow = []
    for unit in UNITS:
        for text in (
            unit * (20_000 // len(unit)),
            unit * (10_000 // len(unit)) + "x" + unit * (10_000 // len(unit)),
        ):
            started = time.process_time()
            try:
                reward.score(Sample("", text, "A", {"choices": ["answer", "a b"]}))
            except Unreadable:
                pass
            if (seconds := time.process_time() - started) > 0.4:
                slow.append((unit, round(seconds, 2)))
    assert slow == []


def test_no_text_breaks_a_verifier_inside_the_service() -> None:
    drawn = random.Random(7)
    pieces = [
        *UNITS,
        "B",
        "ß",
        "İ",
        "ı",
        "ſ",
        "Paris",
        "STRASSE",
        "is correct",
        "]",
        "}",
        "```json",
        '{"a":1',
        ">>",
    ]
    rewards = [BUILTIN[name](labels=("A", "B", "I", "ß")) for name in ["choice"]]
    rewards += [BUILTIN[name]() for name in ["choice", "f1", "exact_list", "repetition"]]
    rewards += [BUILTIN["instructions"](instructions=instructions(), mode="loose")]
    for _ in range(200):
        text = drawn.choice(["", " "]).join(drawn.choices(pieces, k=drawn.randrange(25)))
        for reward in rewards:
            choices = {"choices": ["Paris", "straße", "İ ſ"]} if drawn.random() < 0.5 else {}
            assert 0 <= reward.score(Sample("", text, "A", choices)) <= 1
