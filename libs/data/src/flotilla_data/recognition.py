"""Recognises the columns of a data set by its first rows, and what its answers look like.

Invariant: a layout that `Columns` knows is left to it; any other column has to be named in a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import Any

from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_data.columns import Columns, value_at

Values = Sequence[Mapping[str, Any]]

PROMPTS = ("prompt", "question", "problem", "instruction", "messages")
WHOLE = ("prompt", "messages")
PARTS = ("input", "context", "choices", "options")
"""What belongs to a prompt beside a column that is not one of WHOLE, as in the layouts of Alpaca, SQuAD and MMLU."""
ANSWERS = ("answer", "solution", "output", "completion", "response")
PAIRS = ("chosen", "rejected")
MARK = "####"
"""GSM8K writes it between a worked solution and its final number."""
FORMULA = re.compile(r"[\\$^]|\d\s*[/*+=]\s*\d")
MOST_WORDS = 8
"""The most words of an answer that a model may be expected to repeat as it is."""


@dataclass(frozen=True)
class Fields:
    """The columns of a data set."""

    prompt: str
    answer: str
    """Empty where there is none."""
    texts: bool
    """True where prompts are texts, not chat messages."""
    pairs: bool
    """True where each row has a preferred answer and another one."""
    layout: str
    """Says how the columns are read where they are those of another program; they need no keys then."""


class Answers(StrEnum):
    """The kinds of answers, of which each is judged in another way."""

    missing = "missing"
    numbers = "numbers"
    marked = "marked"
    """A number follows MARK."""
    formulas = "formulas"
    short = "short"
    long = "long"


def recognised(rows: Values, source: str) -> Fields:
    """Return the columns of a data set by its first rows; raise where none of them holds prompts."""
    columns = Columns.of(DataConfig(train=Path(source)), rows[0])
    if not (columns.layout and _filled(rows, [columns.prompt])):
        answers = [columns.answer] if columns.layout else ANSWERS
        columns = replace(
            columns, prompt=_column_of_prompts(rows, source), answer=_filled(rows, answers), layout=""
        )
    texts = any(isinstance(columns.prompt_of(row), str) for row in rows)
    pairs = all(_filled(rows, [name]) for name in PAIRS)
    return Fields(columns.prompt, columns.answer, texts, pairs, columns.shown if columns.layout else "")


def _column_of_prompts(rows: Values, source: str) -> str:
    there = f"the rows have {', '.join(sorted(rows[0])) or 'no columns'}"
    found = _filled(rows, PROMPTS)
    if not found:
        raise InvalidConfig(
            "no column with prompts was recognised",
            where=source,
            why=there,
            next_step=f"rename the one with the prompts to {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}",
        )
    if found not in WHOLE and (part := _filled(rows, PARTS)):
        raise InvalidConfig(
            f"column {found!r} is only a part of the prompt",
            where=source,
            why=f"{there}: the model would never see column {part!r}",
            next_step="write both to a column prompt",
        )
    return found


def _filled(rows: Values, names: Sequence[str]) -> str:
    """Return the first of these columns that has a value in any row, or nothing."""
    found = (name for name in names if any(value_at(row, name) not in (None, "", []) for row in rows))
    return next(found, "")


def kind_of_answers(answers: Sequence[str]) -> Answers:
    """Return the kind of answers that all of these are of; empty ones do not count."""
    given = [answer.strip() for answer in answers if answer.strip()]
    if not given:
        return Answers.missing
    if all(map(_is_number, given)):
        return Answers.numbers
    if all(MARK in answer and _is_number(answer.rpartition(MARK)[2]) for answer in given):
        return Answers.marked
    if any(len(answer.split()) > MOST_WORDS for answer in given):
        return Answers.long
    return Answers.formulas if any(map(FORMULA.search, given)) else Answers.short


def _is_number(text: str) -> bool:
    try:
        return Decimal(text.strip().replace(",", "")).is_finite()
    except InvalidOperation:
        return False
