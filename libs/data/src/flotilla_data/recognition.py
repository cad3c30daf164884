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
from flotilla_data.chats import chat_of
from flotilla_data.columns import ALPACA, OF_EXTRA, OPENAI, TEXT, TRL, Columns, Reads, value_at
from flotilla_data.layouts import Said, prompt_in

Values = Sequence[Mapping[str, Any]]

PROMPTS = ("prompt", "question", "problem", "instruction", "messages")
WHOLE = ("prompt", "messages")
PARTS = ("input", "context", "choices", "options")
"""The columns that belong to a prompt beside one that is not in WHOLE, as in the layouts of Alpaca, SQuAD and MMLU."""
ANSWERS = ("answer", "solution", "output", "completion", "response")
PAIRS = ("chosen", "rejected")
MARK = "####"
"""The mark that GSM8K writes between a worked solution and its final number."""
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
    teaches: Reads
    """The use of these rows: pairs where each has a preferred answer and another one, answers where they are chats,
    texts or long answers to imitate, else prompts."""
    answered: bool
    """True where the rows have the answers that `teaches` asks for, or such that rewards compare with."""
    layout: str
    """Says how the columns are read where they are those of another program; they need no keys then."""

    prompts: bool = True
    """False where the rows are texts without prompts."""

    @property
    def pairs(self) -> bool:
        """True where each row has a preferred answer and another one."""
        return self.teaches is Reads.pairs


class Answers(StrEnum):
    """The kinds of answers, of which each is judged in another way."""

    missing = "missing"
    numbers = "numbers"
    marked = "marked"
    """A number follows MARK."""
    formulas = "formulas"
    short = "short"
    long = "long"
    tasks = "tasks"
    """Those of tasks of reasoning_gym, which say themselves what an answer is worth."""


def recognised(rows: Values, source: str, reads: Reads | None = None) -> Fields:
    """Return the columns of a data set by its first rows, as they are read; raise where none of them holds prompts.

    Without a way to read them it is what these rows are for.
    """
    if reads is not None:
        return _read_as(reads, rows, source)
    paired = all(_filled(rows, [name]) for name in PAIRS)
    if paired or _columns(rows[0], source, Reads.pairs).layout == OPENAI:
        return _read_as(Reads.pairs, rows, source)
    imitated = _columns(rows[0], source, Reads.answers)
    if imitated.layout == TEXT or _are_imitated(rows, imitated):
        return _read_as(Reads.answers, rows, source)
    return _read_as(Reads.prompts, rows, source)


def _read_as(reads: Reads, rows: Values, source: str) -> Fields:
    columns = _columns(rows[0], source, reads)
    answer = _filled(rows, [columns.answer])
    shown = columns.shown(reads) if columns.layout else ""
    if not (columns.layout and _filled(rows, [columns.prompt])):
        alone = reads is Reads.pairs and not _filled(rows, PROMPTS)
        prompt = columns.prompt if alone else _column_of_prompts(rows, source)
        answer = _filled(rows, [columns.answer] if columns.layout else ANSWERS)
        columns, shown = replace(columns, prompt=prompt), ""
    prompts = [prompt_in(row, columns, source) for row in rows if value_at(row, columns.prompt)]
    texts = columns.layout != TEXT and any(isinstance(prompt, str) for prompt in prompts)
    answered = bool(answer) or columns.layout == TEXT or _end_with_answers(prompts)
    if reads is Reads.pairs:
        answered = all(_filled(rows, [name]) for name in (columns.chosen, columns.rejected))
    return Fields(columns.prompt, answer, texts, reads, answered, shown, columns.layout != TEXT)


def _columns(row: Mapping[str, Any], source: str, reads: Reads) -> Columns:
    return Columns.of(DataConfig(train=Path(source)), row, reads)


def _are_imitated(rows: Values, columns: Columns) -> bool:
    """Return whether answers are there to be imitated: turns of chats, messages, or long texts."""
    answers = [value_at(row, columns.answer) for row in rows]
    if not any(answers) and columns.layout:
        return _end_with_answers([prompt_in(row, columns, "") for row in rows])
    learned = columns.layout == TRL or columns.answer == OF_EXTRA[1]
    if learned or any(chat_of(answer, "") for answer in answers):
        return True
    return columns.layout == ALPACA and kind_of_answers([str(answer) for answer in answers]) in (
        Answers.long,
        Answers.marked,
    )


def _end_with_answers(prompts: Sequence[Said]) -> bool:
    """Return whether all of these are chats that end with an answer of the assistant."""
    return all(not isinstance(chat, str) and chat[-1]["role"] == "assistant" for chat in prompts)


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
