"""Compares an answer of the policy with the right one."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WORD = re.compile(r"\w+")


def ends_with_number(answer: str, right: str) -> bool:
    """Return whether the last number of an answer is the right one."""
    wanted, found = number(right), [number(text) for text in NUMBER.findall(answer)]
    return wanted is not None and found[-1:] == [wanted]


def holds(answer: str, right: str) -> bool:
    """Return whether the words of the right answer are in an answer, one behind the other."""
    wanted, said = (" ".join(WORD.findall(text.casefold())) for text in (right, answer))
    return bool(wanted) and f" {wanted} " in f" {said} "


def is_right(answer: str, right: str) -> bool:
    """Return whether an answer is right: a number by the last one in it, another text by its words."""
    return (holds if number(right) is None else ends_with_number)(answer, right)


def number(text: str) -> float | None:
    """Return the number that a text is; None where it is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
