"""Reads pairs of answers: each line of the data file has a prompt, the preferred answer to it and another one.

Invariants: prompts are read, cut and left out as in every data file. Every mistake in an answer is found before the run
starts, with its line number. An answer of chat messages is the text that the template writes after the prompt, up to
the token that ends the assistant's turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_coordinator.data.prompts import (
    Answer,
    AnswerPair,
    Prompt,
    PromptFile,
    in_chunks,
    json_objects,
    load_prompts,
)
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig


@dataclass(frozen=True)
class _Row:
    place: str
    prompt: Prompt
    texts: tuple[str, str]


def load_pairs(path: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
    """Read every line of `path`; each prompt has its pair."""
    file = load_prompts(path, config, tokenizer)
    rows = _rows(path, file.prompts, config, tokenizer)
    paired = [prompt for chunk in in_chunks(rows) for prompt in _paired(chunk, tokenizer)]
    return replace(file, prompts=paired)


def _rows(path: Path, prompts: list[Prompt], config: DataConfig, tokenizer: Tokenizer) -> Iterator[_Row]:
    kept = {prompt.index: prompt for prompt in prompts}
    columns = (config.chosen_field, config.rejected_field)
    for index, (line, values) in enumerate(json_objects(path)):
        if index not in kept:
            continue
        place = f"{path}, line {line}"
        missing = [name for name in columns if values.get(name) is None]
        if missing:
            key = "data.chosen_field" if missing[0] == config.chosen_field else "data.rejected_field"
            raise InvalidConfig(
                f"column {missing[0]!r} is missing",
                where=place,
                why=f"the line has {', '.join(sorted(values))}",
                next_step=f"every pair needs both answers; set {key} where the column has another name",
            )
        given = _messages(values[config.prompt_field], config)
        reader = _AnswerReader(kept[index].prompt_text, given, tokenizer)
        chosen, rejected = (reader.text(values[name], f"column {name!r}", place) for name in columns)
        info = {name: value for name, value in kept[index].info.items() if name not in columns}
        yield _Row(place, replace(kept[index], info=info), (chosen, rejected))


def _messages(prompt: Any, config: DataConfig) -> list[Any] | None:
    """Return the messages of a prompt; None where it is plain text."""
    if isinstance(prompt, list):
        return prompt
    return [{"role": "user", "content": prompt}] if config.apply_chat_template else None


@dataclass(frozen=True)
class _AnswerReader:
    """Reads the answers to one prompt."""

    prompt_text: str
    messages: list[Any] | None
    tokenizer: Tokenizer

    def text(self, raw: Any, what: str, place: str) -> str:
        """Return the text that the model should answer after the prompt."""
        if isinstance(raw, list):
            raw = self._rendered(raw, what, place)
        if not isinstance(raw, str):
            raise InvalidConfig(
                f"{what} is neither text nor a list of chat messages",
                where=place,
                why=f"it is a {type(raw).__name__}",
            )
        if not raw.strip():
            raise InvalidConfig(f"{what} is an empty answer", where=place)
        return raw

    def _rendered(self, messages: list[Any], what: str, place: str) -> str:
        """Render chat messages that are the answer, or the prompt and the answer."""
        if self.messages is None:
            raise InvalidConfig(
                f"{what} holds chat messages, but the prompt is bare text",
                where=place,
                next_step="set data.apply_chat_template, or write the answer as text",
            )
        given = len(self.messages)
        answer = messages[given:] if messages[:given] == self.messages else messages
        roles = [message.get("role") if isinstance(message, dict) else None for message in answer]
        if roles != ["assistant"]:
            raise InvalidConfig(
                f"{what} is not one message of the assistant after the prompt",
                where=place,
                why=f"after the prompt it has messages of {', '.join(map(str, roles)) or 'no role'}",
                next_step="put everything before the last message into the prompt",
            )
        if not str(answer[0].get("content") or "").strip():
            return ""
        whole = self.tokenizer.render_chat([*self.messages, *answer], begin_answer=False)
        if not whole.startswith(self.prompt_text):
            raise InvalidConfig(
                f"the chat template does not write {what} after the prompt",
                where=place,
                why="what it writes with the answer does not begin with what it writes without",
                next_step="write the answer as text",
            )
        # Some templates write a newline after the token that ends the turn, but the model stops before it.
        return whole.removeprefix(self.prompt_text).rstrip()


def _paired(rows: list[_Row], tokenizer: Tokenizer) -> Iterator[Prompt]:
    encoded = iter(tokenizer.encode_many([text for row in rows for text in row.texts]))
    for row in rows:
        chosen, rejected = (Answer(text, _ended(next(encoded), tokenizer)) for text in row.texts)
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            raise InvalidConfig(
                "both answers are the same",
                where=row.place,
                next_step="leave the line out: it prefers nothing",
            )
        yield replace(row.prompt, pair=AnswerPair(chosen, rejected))


def _ended(token_ids: list[int], tokenizer: Tokenizer) -> np.ndarray:
    """Add the end token to an answer of plain text; a template has written it already."""
    end = [] if token_ids[-1] in tokenizer.eos_ids else [tokenizer.eos_id]
    return np.asarray([*token_ids, *end], dtype=np.int32)
