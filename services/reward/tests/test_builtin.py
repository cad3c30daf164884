from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from flotilla_reward.builtin import CannotScore, Math, Sample, Unverifiable
from flotilla_reward.table import BUILTIN

GSM8K = "FLOTILLA_BENCH_GSM8K"
"""The variable with the path of a file of GSM8K."""


def score(name: str, response: str, answer: str = "", **parameters: object) -> float:
    return BUILTIN[name](**parameters).score(Sample("", response, answer, {}))


@pytest.mark.parametrize(
    ("response", "answer", "parameters", "expected"),
    [
        ("46", "46", {}, 1),
        (" 46\n", "46", {}, 1),
        ("046", "46", {}, 0),
        ("", "46", {}, 0),
        ("Paris", "paris", {}, 0),
        ("Paris", "paris", {"ignore_case": True}, 1),
        ("2+2 #### 4 #### 5", "5", {"after": "####"}, 1),
        ("5", "5", {"after": "####"}, 0),
    ],
)
def test_exact_compares_texts(response: str, answer: str, parameters: dict, expected: float) -> None:
    assert score("exact", response, answer, **parameters) == expected


@pytest.mark.parametrize(
    ("response", "answer", "parameters", "expected"),
    [
        ("first 3, then 1,234.50", "1234.5", {}, 1),
        ("-7e2", "-700", {}, 1),
        ("100000000000000000000000000001", "100000000000000000000000000002", {"relative_tolerance": 0}, 0),
        ("0.33", "0.3333", {}, 0),
        ("0.33", "0.3333", {"absolute_tolerance": 0.01}, 1),
        ("99", "100", {"relative_tolerance": 0.02}, 1),
        ("no number here", "3", {}, 0),
        ("1e999999999999999999999999", "3", {}, 0),
        ("1e400", "1e400", {}, 1),
        ("7 = 8", "7", {"after": "="}, 0),
    ],
)
def test_numeric_compares_the_last_number(
    response: str, answer: str, parameters: dict, expected: float
) -> None:
    assert score("numeric", response, answer, **parameters) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think> <answer>b</answer>\n", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<answer>b</think></answer>", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("b", 0),
    ],
)
def test_format_wants_each_section_once_and_in_order(response: str, expected: float) -> None:
    assert score("format", response) == expected


@pytest.mark.parametrize(
    ("response", "answer", "parameters", "expected"),
    [
        ("x = 12;", "", {"pattern": r"\d+"}, 1),
        ("x = 12;", "", {"pattern": r"\d+", "match": "whole"}, 0),
        ("x = 12;", "12", {"pattern": r"x = (\d+)", "group": 1}, 1),
        ("x = 12;", "13", {"pattern": r"x = (?P<x>\d+)", "group": "x"}, 0),
        ("x = ;", "13", {"pattern": r"x = (\d+)?", "group": 1}, 0),
        ("A\nB", "", {"pattern": "a.b", "ignore_case": True, "dot_matches_newline": True}, 1),
    ],
)
def test_regex_matches_and_compares_a_group(
    response: str, answer: str, parameters: dict, expected: float
) -> None:
    assert score("regex", response, answer, **parameters) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1),
        (r"so \boxed{0.5}", "1/2", 1),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
        ("the answer is 41", "42", 0),
        ("", "42", 0),
        ("I do not know", "42", 0),
        (r"\boxed{", "42", 0),
        (r"\boxed{\frac{}{}}", "42", 0),
    ],
)
def test_math_compares_expressions(response: str, answer: str, expected: float) -> None:
    assert score("math", response, answer) == expected


def test_math_judges_a_table_of_answers_and_responses() -> None:
    rows = (Path(__file__).parent / "math_pairs.tsv").read_text().splitlines()
    pairs = [row.split("\t") for row in rows if not row.startswith("#")]
    assert len(pairs) >= 400
    judge = Math()
    wrong = [
        (answer, response)
        for expected, answer, response in pairs
        if judge.score(Sample("", response, answer, {})) != float(expected)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("He answered 8 of 9.\n#### 8", "8", 1),
        ("It rounds down to 33%.\n#### 33", "33", 1),
        ("The answer is 8.\n#### 9", "8", 0),
        ("#### 8\nNo, the answer is 9.", "8", 0),
        ("#### 8 #### 9\n", "9", 1),
        ("So 33.\n####33", "33", 1),
        ("She has 5+28=33 apples.\n####33", "33", 1),
        ("Total 1/2\n####1/2", "1/2", 1),
        ("The answer is $33$.\n\n#### Done", "33", 1),
        ("The answer is 33\n#### Q.E.D.", "33", 1),
        ("We get $x=33$.\n#### Conclusion: see above", "33", 1),
        ("Answer is $33$. #### checked 2 times", "33", 1),
        (r"So \boxed{8}." + "\n#### 9", "8", 1),
        ("The answer is 8.\n#### ", "8", 1),
        (r"Its answer: $x$" + "\n#### \\frac{1}{2}", "1/2", 1),
    ],
)
def test_math_takes_what_the_last_line_states_as_the_answer(
    response: str, answer: str, expected: float
) -> None:
    assert score("math", response, answer) == expected


@pytest.mark.skipif(GSM8K not in os.environ, reason=f"{GSM8K} names no file of GSM8K")
def test_math_takes_every_answer_of_gsm8k_and_none_with_another_digit() -> None:
    """The response is the worked solution; its answer then has a digit that is one more, each digit in turn."""
    judge, wrong, tried = Math(), [], 0
    for row in Path(os.environ[GSM8K]).read_text().splitlines():
        solution, _, answer = json.loads(row)["answer"].rpartition("\n#### ")
        changed = [
            answer[:place] + str((int(digit) + 1) % 10) + answer[place + 1 :]
            for place, digit in enumerate(answer)
            if digit.isdigit()
        ]
        for expected, stated in [(1.0, answer), *((0.0, one) for one in changed)]:
            tried += 1
            if judge.score(Sample("", f"{solution}\n#### {stated}", answer, {})) != expected:
                wrong.append((answer, stated))
    assert tried > 2_000
    assert wrong == []


@pytest.mark.parametrize("wraps", [r"\boxed{\{%s\}}", r"so $\{%s\}$", r"it is \[ (%s) \]", r"\boxed{%s"])
def test_math_reads_no_list_that_is_far_longer_than_the_answer(wraps: str) -> None:
    collide = ", ".join(str(number * (2**61 - 1)) for number in range(5_000))
    started = time.monotonic()
    with pytest.raises(Unverifiable, match="it lists 4999 items, and the answer 3"):
        score("math", wraps % collide, r"\{1, 2, 3\}")
    assert time.monotonic() - started < 1


def test_math_reads_lists_as_long_as_the_answer_and_prose_with_many_commas() -> None:
    items = ", ".join(map(str, range(80)))
    assert score("math", rf"\boxed{{\{{{items}\}}}}", rf"\{{{items}\}}") == 1
    assert score("math", rf"It is \boxed{{7}}. Why: {', '.join(['as said'] * 90)}.", "7") == 1
    assert score("math", rf"She pays $5, {', '.join(['then waits'] * 90)}, then $6: \boxed{{11}}", "11") == 1
    assert score("math", f"well, {'so, ' * 500} it is $4$", "4") == 1


@pytest.mark.parametrize("name", ["exact", "numeric", "math"])
def test_a_missing_answer_is_no_score(name: str) -> None:
    with pytest.raises(CannotScore, match="no answer"):
        score(name, "46", " ")


def test_an_answer_that_is_no_number_is_no_score() -> None:
    with pytest.raises(CannotScore, match="'many' is not a number"):
        score("numeric", "46", "many")


def test_math_has_no_time_limit_of_its_own() -> None:
    # A limit of math-verify's needs SIGALRM and, in a thread, would turn every answer into a wrong one.
    import threading

    scores: list[float] = []
    thread = threading.Thread(
        target=lambda: scores.append(Math().score(Sample("", r"\boxed{42}", "42", {}))),
        name="not the main thread",
    )
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize("name", ["exact", "numeric", "format"])
@pytest.mark.parametrize("text", ["1" * 200_000, "1,." * 70_000, "<think>" * 30_000, "1e" * 100_000])
def test_rewards_that_run_inside_the_service_take_linear_time(name: str, text: str) -> None:
    started = time.monotonic()
    score(name, text, "1")
    assert time.monotonic() - started < 0.5
