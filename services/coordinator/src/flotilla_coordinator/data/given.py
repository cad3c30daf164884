"""Reads given answers: one that the model learns to give, or a pair of which one is preferred.

Invariants: prompts are read, cut and left out as in every data set. A wrong answer is a bad row, named by its file and
line. An answer of text follows the prompt as it is, with the end token; chat messages are what the template writes, and
of them the turns that are learned. No token holds letters of a learned part and of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flotilla_coordinator.data.chat_turns import ChatText, learned_texts
from flotilla_coordinator.data.prompts import Answer, LeftOut, Made, PromptFile, Stage, load_prompts
from flotilla_core.config import DataConfig
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_data.chats import Messages
from flotilla_data.columns import Columns, Reads
from flotilla_data.layouts import as_messages
from flotilla_data.tokenizer import Tokenizer

Part = tuple[list[int], bool]
"""Tokens, and whether they are learned."""
Written = str | ChatText
"""A text that follows a prompt as it is, or a chat with its prompt."""


def load_given(
    source: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    copies: Path | None = None,
    *,
    reads: Reads,
    whole: bool = False,
    stages: Sequence[Stage] = (),
) -> PromptFile:
    """Read a data set whose prompts have answers; `whole` learns all that follows a prompt."""
    given = GivenAnswers(config, tokenizer, reads, whole)
    return load_prompts(source, config, tokenizer, copies, (given, *stages), reads)


@dataclass(frozen=True)
class GivenAnswers:
    """Adds to each prompt the answers of its row."""

    config: DataConfig
    tokenizer: Tokenizer
    reads: Reads
    whole: bool = False
    """True leaves the mask out, for models that judge a whole answer."""

    def require(self, values: dict[str, object], columns: Columns, where: str) -> None:
        """Do nothing: reading the row judged its answers."""

    def finish(self, made: list[Made], columns: Columns) -> list[Made | LeftOut]:
        """Return the prompts with their answers."""
        written = [self._written(one) for one in made]
        all_written = [text for found in written if not isinstance(found, LeftOut) for text in found]
        chats = iter(chat_parts([text for text in all_written if isinstance(text, ChatText)], self.tokenizer))
        plain = iter(self.tokenizer.encode_many([text for text in all_written if isinstance(text, str)]))
        finished: list[Made | LeftOut] = []
        for one, found in zip(made, written, strict=True):
            if isinstance(found, LeftOut):
                finished.append(found)
                continue
            sequences: list[list[Part]] = [
                next(chats) if isinstance(text, ChatText) else [(one.uncut, False), (next(plain), True)]
                for text in found
            ]
            finished.append(self._answered(one, found, sequences))
        return finished

    def _written(self, one: Made) -> list[Written] | LeftOut:
        """Return each answer as it is written; turns that cannot share a sequence are one each."""
        found: list[Written] = []
        try:
            for said, column in zip(one.example.given, one.example.sources, strict=True):
                found += [said] if isinstance(said, str) else self._rendered(one, said, f"column {column!r}")
        except FlotillaError as error:
            return LeftOut(one.number, error)
        return found

    def _rendered(self, one: Made, given: Messages, what: str) -> list[ChatText]:
        prompt = as_messages(one.example.prompt, self.config)
        if prompt is None:
            raise InvalidConfig(
                f"{what} holds chat messages, but the prompt is bare text",
                where=one.where,
                next_step="set data.apply_chat_template, or write the answer as text",
            )
        found = learned_texts(prompt, given, one.example.tools, self.tokenizer, what, one.where)
        if self.reads is Reads.pairs and len(found) > 1:
            raise InvalidConfig(
                f"the turns of {what} cannot be compared as one answer",
                where=one.where,
                why="the chat template rewrites earlier turns when later ones follow",
                next_step="put everything before the last message into the prompt",
            )
        return found

    def _answered(self, one: Made, written: list[Written], sequences: list[list[Part]]) -> Made | LeftOut:
        """Divide the sequences where they first differ or are first learned: a group has one prompt."""
        # Most are short: lists take a third of the time of arrays.
        tokens = [[token for own, _ in parts for token in own] for parts in sequences]
        learned = [[flag for own, flag in parts for _ in own] for parts in sequences]
        if not one.uncut and not one.example.prompt:
            learned[0][0] = False  # nothing comes before the first token of a running text
        for own, flags in zip(tokens, learned, strict=True):
            if own[-1] not in self.tokenizer.eos_ids:
                own.append(self.tokenizer.eos_id)
                flags.append(True)
        begin = min(flags.index(True) if True in flags else 0 for flags in learned)
        for own in tokens[1:]:
            if own[:begin] != tokens[0][:begin]:
                begin = next(place for place, token in enumerate(own) if token != tokens[0][place])
        answers = [
            Answer(
                text if isinstance(text, str) else text.text[text.spans[0][0] :],
                np.array(own[begin:], np.int32),
                None if self.whole or all(flags[begin:]) else np.array(flags[begin:]),
            )
            for text, own, flags in zip(written, tokens, learned, strict=True)
        ]
        if self.reads is Reads.pairs and tokens[0][begin:] == tokens[1][begin:]:
            error = InvalidConfig(
                "both answers are the same",
                where=one.where,
                next_step="leave the line out: it prefers nothing",
            )
            return LeftOut(one.number, error)
        prompt = np.array(tokens[0][:begin][-self.config.max_prompt_tokens :], np.int32)
        return one._replace(prompt=replace(one.prompt, token_ids=prompt, given=tuple(answers)))


def chat_parts(texts: list[ChatText], tokenizer: Tokenizer) -> list[list[Part]]:
    """Return the tokens of chats, in parts that are learned and parts that are not, in turns.

    Each is tokenized as a whole. Where the tokenizer would join letters of two parts to a token, each gets tokens of
    its own: the model does not see what follows when it begins to write.
    """
    wholes = tokenizer.encode_many([one.text for one in texts])
    pieces = iter(tokenizer.encode_many([piece for one in texts for piece in one.pieces]))
    found: list[list[Part]] = []
    for one, whole in zip(texts, wholes, strict=True):
        own = [next(pieces) for _ in one.pieces]
        if [token for piece in own for token in piece] != whole:
            own = _cut(one.text, one.cuts, whole, tokenizer)
        found.append([(piece, bool(place % 2)) for place, piece in enumerate(own)])
    return found


def _cut(text: str, cuts: Sequence[int], whole: list[int], tokenizer: Tokenizer) -> list[list[int]]:
    """Cut the tokens of a text where its parts meet; a tokenizer may begin every text with a token of its own."""
    found: list[list[int]] = []
    done = 0
    for place, cut in enumerate(cuts):
        head = tokenizer.encode(text[:cut])
        if whole[: len(head)] != head:
            after = [later - cut for later in cuts[place + 1 :]]
            before = _cut(text[:cut], cuts[:place], head, tokenizer)
            return before + _cut(text[cut:], after, tokenizer.encode(text[cut:]), tokenizer)
        found.append(whole[done : len(head)])
        done = len(head)
    return [*found, whole[done:]]
