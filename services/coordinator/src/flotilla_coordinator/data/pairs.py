"""Reads pairs of answers: each row has a prompt, the preferred answer to it and another one.

Invariants: prompts are read, cut and left out as in every data set. A wrong answer is a bad row, named by its file and
line. An answer of chat messages is the text that the template writes after the prompt, up to the token that ends the
assistant's turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_coordinator.data.prompts import Answer, AnswerPair, LeftOut, Made, PromptFile, load_prompts
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_core.config import DataConfig
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_data.columns import Columns, Messages, as_messages, require_text, value_at


def load_pairs(
    source: Path, config: DataConfig, tokenizer: Tokenizer, copies: Path | None = None
) -> PromptFile:
    """Read a data set whose prompts each have a pair."""
    return load_prompts(source, config, tokenizer, copies, (Pairs(config, tokenizer),))


@dataclass(frozen=True)
class Pairs:
    """Adds the two answers to each prompt."""

    config: DataConfig
    tokenizer: Tokenizer

    def require(self, values: dict[str, Any], columns: Columns, where: str) -> None:
        """Refuse a row that lacks an answer."""
        for name, key in ((columns.chosen, "chosen_field"), (columns.rejected, "rejected_field")):
            if value_at(values, name) is None:
                raise InvalidConfig(
                    f"column {name!r} is missing",
                    where=where,
                    why=f"the line has {', '.join(sorted(values))}",
                    next_step=f"every pair needs both answers; set data.{key} where the column has another name",
                )

    def finish(self, made: list[Made], columns: Columns) -> list[Made | LeftOut]:
        """Return the prompts with their pairs."""
        read = [self._read(one, columns) for one in made]
        texts = [text for one in read if not isinstance(one, LeftOut) for text in one]
        encoded = iter(self.tokenizer.encode_many(texts))
        return [
            answers if isinstance(answers, LeftOut) else self._paired(one, answers, encoded, columns)
            for one, answers in zip(made, read, strict=True)
        ]

    def _read(self, one: Made, columns: Columns) -> tuple[str, str] | LeftOut:
        """Return the texts of the two answers."""
        prompt = columns.prompt_of(one.values)
        messages = as_messages(prompt, self.config)
        given = prompt if isinstance(prompt, list) else messages
        reader = _AnswerReader(one.prompt.prompt_text, given, messages, self.tokenizer)
        try:
            chosen, rejected = (
                reader.text(value_at(one.values, name), f"column {name!r}", one.where)
                for name in (columns.chosen, columns.rejected)
            )
        except FlotillaError as error:
            return LeftOut(one.number, error)
        return chosen, rejected

    def _paired(
        self, one: Made, texts: tuple[str, str], encoded: Iterator[list[int]], columns: Columns
    ) -> Made | LeftOut:
        chosen, rejected = (Answer(text, _ended(next(encoded), self.tokenizer)) for text in texts)
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            error = InvalidConfig(
                "both answers are the same",
                where=one.where,
                next_step="leave the line out: it prefers nothing",
            )
            return LeftOut(one.number, error)
        info = {
            name: value
            for name, value in one.prompt.info.items()
            if name not in (columns.chosen, columns.rejected)
        }
        return replace(one, prompt=replace(one.prompt, info=info, pair=AnswerPair(chosen, rejected)))


@dataclass(frozen=True)
class _AnswerReader:
    """Reads the answers to one prompt."""

    prompt_text: str
    given: Messages | None
    """The messages of the prompt as the data set has them; None where the prompt is plain text."""
    messages: Messages | None
    """The same with the system prompt of the configuration."""
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
        if self.messages is None or self.given is None:
            raise InvalidConfig(
                f"{what} holds chat messages, but the prompt is bare text",
                where=place,
                next_step="set data.apply_chat_template, or write the answer as text",
            )
        given = len(self.given)
        answer = messages[given:] if messages[:given] == self.given else messages
        roles = [message.get("role") if isinstance(message, dict) else None for message in answer]
        if roles != ["assistant"]:
            raise InvalidConfig(
                f"{what} is not one message of the assistant after the prompt",
                where=place,
                why=f"after the prompt it has messages of {', '.join(map(str, roles)) or 'no role'}",
                next_step="put everything before the last message into the prompt",
            )
        require_text(answer, place)
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


def _ended(token_ids: list[int], tokenizer: Tokenizer) -> np.ndarray:
    """Add the end token to an answer of plain text; a template has written it already."""
    end = [] if token_ids[-1] in tokenizer.eos_ids else [tokenizer.eos_id]
    return np.asarray([*token_ids, *end], dtype=np.int32)
