"""Prompts of a run, in an order that a restart repeats exactly.

Invariants: a data file is read and tokenized whole before the run starts, so every mistake in it is found
then, with its line number; `index` is the line's place in the file and never changes; the order of an epoch
depends on the seed and the epoch alone; a saved cursor fits only the very data that it was saved with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flotilla_coordinator.data.answer_pair import AnswerPair
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_core.config.run import DataConfig
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.ids import derive_seed

ROWS_AT_ONCE = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt in one epoch."""

    epoch: int
    index: int
    prompt_text: str
    token_ids: npt.NDArray[np.int32]
    answer: str
    info: dict[str, Any]
    """The line's other columns."""
    pair: AnswerPair | None = None
    """Where the data set says which of two answers is better."""


@dataclass(frozen=True)
class PromptFile:
    """What a data file holds after the overlong prompts were dealt with."""

    prompts: list[Prompt]
    """In the order of the file, epoch 0."""
    dropped: int
    truncated: int


Load = Callable[[Path, DataConfig, Tokenizer], PromptFile]
"""Reads a data file, by the columns that the configuration names."""


class PromptSource:
    """Prompts without end: epoch after epoch."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seed: int, load: Load | None = None) -> None:
        self.file = (load or load_prompts)(config.train, config, tokenizer)
        self._seed = seed
        self._shuffle = config.shuffle
        self._fingerprint = _fingerprint(self.file.prompts)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.file.prompts)

    def next(self) -> Prompt:
        """The next prompt; the next epoch begins where one ends."""
        if self._position == len(self._order):
            self._enter(self._epoch + 1, 0)
        prompt: Prompt = self.file.prompts[self._order[self._position]]
        self._position += 1
        return replace(prompt, epoch=self._epoch)

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the next prompt will come from."""
        return {"epoch": self._epoch, "position": self._position, "data": self._fingerprint}

    def restore(self, cursor: dict[str, Any]) -> None:
        """Go on exactly where `cursor` was taken."""
        if cursor["data"] != self._fingerprint:
            raise FailedPrecondition(
                "the saved place in the data set does not fit the data",
                why="the training file, the tokenizer or data.max_prompt_tokens changed since then",
                next_step="restore them, or start a new run",
            )
        self._enter(cursor["epoch"], cursor["position"])

    def _enter(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """Sorted by random keys: raw Philox numbers are the same in every numpy version."""
        if not self._shuffle:
            return np.arange(len(self.file.prompts))
        keys = np.random.Philox(derive_seed(self._seed, "data order", epoch)).random_raw(
            len(self.file.prompts)
        )
        return np.argsort(keys, kind="stable")


def load_prompts(path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
    """Read, render and tokenize every line of `path` with the columns that `config` names."""
    prompts: list[Prompt] = []
    dropped = truncated = 0
    for chunk in in_chunks(_rows(path, config, tokenizer)):
        # A rendered template brings its own special tokens; a bare text gets the tokenizer's.
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
        yield _Row(line, index, text, bare, answer_text, values, [])


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every line that holds one, with its number."""
    if not path.is_file():
        raise InvalidConfig(
            "the data file does not exist", where=str(path), next_step="set data.train or evaluation.data"
        )
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                values = json.loads(raw)
            except ValueError as error:
                raise InvalidConfig(
                    "the line is not JSON", where=f"{path}, line {line}", why=str(error)
                ) from error
            if not isinstance(values, dict):
                raise InvalidConfig(
                    "the line is not a JSON object",
                    where=f"{path}, line {line}",
                    why=f"it is a {type(values).__name__}",
                )
            yield line, values


def _prompt_text(raw: object, config: DataConfig, tokenizer: Tokenizer, where: str) -> tuple[str, bool]:
    """The text to tokenize, and whether it is bare of special tokens."""
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
    """So many at a time that tokenizing them uses all cores."""
    chunk: list[T] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _prompt(row: _Row, config: DataConfig) -> Prompt:
    """Truncation keeps the end: a prompt's question and the template's last words stand there."""
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


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(prompt.index.to_bytes(8, "little"))
        digest.update(len(prompt.token_ids).to_bytes(8, "little"))
        digest.update(prompt.token_ids.astype("<i4").tobytes())
    return digest.hexdigest()
