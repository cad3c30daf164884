from __future__ import annotations

import pytest

from flotilla_reward.builtin import CannotScore, Sample
from flotilla_reward.verifiers.lists import F1, ExactList


@pytest.mark.parametrize(
    ("response", "answer", "info", "expected"),
    [
        ("Paris", "Paris", {}, 1),
        ("The Paris!", "paris", {}, 1),
        ("in Paris", "Paris", {}, 2 / 3),
        ("Rome", "Paris", {}, 0),
        ("", "Paris", {}, 0),
        ("paris paris", "paris", {}, 2 / 3),
        ("New York", '["NYC", "New York City"]', {}, 0.8),
        ("NYC", "New York City", {"answers": ["NYC", "Big Apple"]}, 1),
        ("Big Apple", "", {"references": ["NYC", "Big Apple"]}, 1),
        ("我喜欢苹果", "我喜欢梨", {}, 2 * 3 / 9),
        ("Ｐａｒｉｓ", "Paris", {}, 1),
        ("Pa\u200bris", "Paris", {}, 1),
        ("it's", "its", {}, 1),
        ("3", "3", {"answers": [3]}, 1),
        ("Denver", "", {"answers": {"text": ["Denver", "Denver Broncos"], "answer_start": [177, 177]}}, 1),
        ("Denver", '{"text": ["Denver"], "answer_start": [177]}', {}, 1),
        ("none", "Paris", {"answers": None, "references": ["Rome", None]}, 0),
        ("answer start 177", "", {"answers": {"text": "Denver", "answer_start": 177}}, 0),
    ],
)
def test_f1_compares_words_with_the_reference_that_fits_best(
    response: str, answer: str, info: dict, expected: float
) -> None:
    assert F1().score(Sample("", response, answer, info)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "answer", "parameters", "expected"),
    [
        ("fig, plum", "fig, plum", {}, 1),
        ("fig,plum", '["fig", "plum"]', {}, 1),
        ('["fig", "plum"]', "fig, plum", {}, 1),
        ("- fig\n- plum", "fig, plum", {}, 1),
        ("1. fig\n2. plum", "fig, plum", {}, 1),
        ("fig, plum, and pear", "fig, plum, pear", {}, 1),
        ("[fig, 'plum']", "fig, plum", {}, 1),
        ("plum, fig", "fig, plum", {}, 0),
        ("plum, fig", "fig, plum", {"ordered": False}, 1),
        ("fig, fig, plum", "fig, plum", {"ordered": False}, 0),
        ("fig, plum, fig", "fig, fig, plum", {"ordered": False}, 1),
        ("fig, plum, pear", "fig, plum", {"ordered": False}, 0),
        ("fig", "fig, plum", {}, 0),
        ("", "fig, plum", {}, 0),
        ("Fig, Plum", "fig, plum", {}, 0),
        ("Fig, Plum", "fig, plum", {"ignore_case": True}, 1),
        ("a, b | c", "a, b | c", {"separator": "|"}, 1),
        ("c | a, b", "a, b | c", {"separator": "|"}, 0),
        ("so: #### fig; plum", "fig, plum", {"after": "####"}, 1),
        ("fig, plum", "fig, plum", {"after": "####"}, 0),
        ("1, 2, 3", "[1, 2, 3]", {}, 1),
        ("無花果、梨", "無花果，梨", {}, 1),
        ("[" * 100_000, "fig", {}, 0),
    ],
)
def test_exact_list_compares_items(response: str, answer: str, parameters: dict, expected: float) -> None:
    assert ExactList(**parameters).score(Sample("", response, answer, {})) == expected


@pytest.mark.parametrize("reward", [F1(), ExactList()])
@pytest.mark.parametrize("answer", ["", " , ", "[]"])
def test_a_row_without_a_reference_is_no_score(reward: F1 | ExactList, answer: str) -> None:
    with pytest.raises(CannotScore):
        reward.score(Sample("", "fig", answer, {}))


@pytest.mark.parametrize(
    "answers", [None, [None], {"text": []}, {"value": "Paris"}, [{"aliases": ["Paris"]}, "Rome"]]
)
def test_what_is_neither_text_nor_number_is_no_reference(answers: object) -> None:
    with pytest.raises(CannotScore, match="reference"):
        F1().score(Sample("", "none", "", {"answers": answers}))
