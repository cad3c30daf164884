"""Reads the prompts of a data file, each with its two answers where a run learns preferences.

Invariants: a data file is read and tokenized whole before the run starts, so every mistake in it is found then, with
its line number; `index` is the line's place in the file and never changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.json_text import json_object
from flotilla_core.structs import unfit

ROWS_AT_ONCE = 4096
LONGEST_LINE = 64 << 20
"""The limit in bytes; a prompt of a million tokens has a tenth of that."""

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A given answer, with the token that ends it."""

    text: str
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class AnswerPair:
    """The two answers of a preference: the chosen one and the rejected one."""

    chosen: Answer
    rejected: Answer


@dataclass(frozen=True)
class Prompt:
    """One prompt in one epoch."""

    epoch: int
    index: int
    """The prompt's place among all prompts of the run, one file after the other."""
    prompt_text: str
    token_ids: npt.NDArray[np.int32]
    answer: str
    info: dict[str, Any]
    """The line's other columns."""
    pair: AnswerPair | None = None
    """The other columns of the line."""
    data_set: str = ""
    """The two answers, where the data set prefers one of them."""
    teacher: str = ""
    """The name of its data set, where the run has several."""


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a data file, without those that are too long where these are dropped."""

    prompts: list[Prompt]
    """All prompts in the order of the file, in epoch 0."""
    dropped: int
    truncated: int

    @property
    def rows(self) -> int:
        """Return the number of lines of the file."""
        return len(self.prompts) + self.dropped


Load = Callable[[Path, DataConfig, Tokenizer], PromptFile]
"""Reads a data file, by the columns that the configuration names."""


def load_prompts(path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
    """Read, render and tokenize every line of `path` with the columns that `config` names."""
    prompts: list[Prompt] = []
    dropped = truncated = 0
    for chunk in in_chunks(_rows(path, config, tokenizer)):
        # A rendered template has its own special tokens; a plain text gets the tokenizer's.
        for bare in (True, False):
            part = [row for row in chunk if row.bare is bare]
            encoded = tokenizer.encode_many([row.text for row in part], special=bare)
            for row, ids in zip(part, encoded, strict=True):
                row.token_ids = ids
        for row in chunk:
            if len(row.token_ids) > config.max_prompt_tokens:
                if config.overlong_prompts == "drop":
                    dropped += 1
                    continue
                if config.overlong_prompts == "error":
                    raise _overlong(path, row, config)
                truncated += 1
            prompts.append(_prompt(row, config))
    if not prompts:
        why = f"all {dropped} prompts are longer than data.max_prompt_tokens = {config.max_prompt_tokens}"
        raise InvalidConfig(
            "the data set has no prompts",
            where=str(path),
            why=why if dropped else "the file has no lines",
            next_step="raise data.max_prompt_tokens" if dropped else "add one JSON object a line",
        )
    return PromptFile(prompts, dropped, truncated)


@dataclass
class _Row:
    line: int
    index: int
    text: str
    bare: bool
    answer: str
    info: dict[str, Any]
    token_ids: list[int]


def _rows(path: Path, config: DataConfig, tokenizer: Tokenizer) -> Iterator[_Row]:
    for index, (line, values) in enumerate(json_objects(path)):
        raw = values.pop(config.prompt_field, None)
        if raw is None:
            raise InvalidConfig(
                f"column {config.prompt_field!r} is missing",
                where=f"{path}, line {line}",
                why=f"the line has {', '.join(sorted(values)) or 'no columns'}",
                next_step="set data.prompt_field",
            )
        answer = values.pop(config.answer_field, None)
        text, bare = _prompt_text(raw, config, tokenizer, f"{path}, line {line}")
        if not text:
            raise InvalidConfig("the prompt is empty", where=f"{path}, line {line}")
        answer_text = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)
        yield _Row(line, index, text, bare, answer_text, told_to_rewards(values, f"{path}, line {line}"), [])


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return every line that holds an object, with its number."""
    try:
        if not path.is_file():
            raise InvalidConfig(
                "the data file does not exist", where=str(path), next_step="set data.train or evaluation.data"
            )
        opened = path.open("rb")
    except OSError as error:
        raise InvalidConfig(
            "the data file cannot be read",
            where=str(path),
            why=error.strerror or str(error),
            next_step="set data.train or evaluation.data",
        ) from None
    with opened as file:
        for line in count(1):
            where = f"{path}, line {line}"
            if not (raw := file.readline(LONGEST_LINE + 1)):
                return
            if len(raw) > LONGEST_LINE:
                raise InvalidConfig(
                    "the line is too long",
                    where=where,
                    why=f"it has more than {LONGEST_LINE} bytes, the limit",
                )
            if not raw.strip():
                continue
            yield line, json_object(raw, where, what="the line", finite=True)


def told_to_rewards(columns: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the other columns of a line, which are sent to the rewards with its samples."""
    for name, value in columns.items():
        if problem := unfit(value, f"column {name}"):
            raise InvalidConfig(
                "the line has a value that cannot be sent to a reward", where=where, why=problem
            )
    return columns


def _prompt_text(raw: object, config: DataConfig, tokenizer: Tokenizer, where: str) -> tuple[str, bool]:
    """Return the text to tokenize, and whether it has no special tokens yet."""
    if isinstance(raw, str):
        if not config.apply_chat_template:
            return raw, True
        return tokenizer.render_chat([{"role": "user", "content": raw}]), False
    if isinstance(raw, list) and raw and all(isinstance(m, dict) and "role" in m for m in raw):
        return tokenizer.render_chat(raw), False
    raise InvalidConfig(
        f"column {config.prompt_field!r} is neither text nor a list of chat messages",
        where=where,
        why=f"it is a {type(raw).__name__}",
    )


def in_chunks(rows: Iterator[T]) -> Iterator[list[T]]:
    """Group the rows into chunks that are large enough to tokenize on all cores."""
    chunk: list[T] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _prompt(row: _Row, config: DataConfig) -> Prompt:
    """Make the prompt; truncation keeps the end, with the question and the template's last words."""
    token_ids = np.asarray(row.token_ids[-config.max_prompt_tokens :], dtype=np.int32)
    return Prompt(0, row.index, row.text, token_ids, row.answer, row.info)


def _overlong(path: Path, row: _Row, config: DataConfig) -> InvalidConfig:
    return InvalidConfig(
        f"the prompt has {len(row.token_ids)} tokens, more than data.max_prompt_tokens = "
        f"{config.max_prompt_tokens}",
        where=f"{path}, line {row.line}",
        why="data.overlong_prompts is error",
        next_step="raise the limit, or set data.overlong_prompts to drop or truncate",
    )
