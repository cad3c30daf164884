"""Keeps the tokens of one episode: what the policy wrote as it was sampled, and what the chat template writes between.

Invariants: what the policy sampled is never encoded again, and is trained in one sequence alone: the one in which it
was sampled. Context is what the template writes after a turn of the policy, encoded as it stands there. A turn that the
template writes with other white space, or a call that it spells in another way, stays as it was sampled. A history
that does not go on from what is there opens a branch: a sequence with a prompt of its own, counted with its reason. In
that prompt, turns that the history keeps have their sampled tokens. No context follows the last turn of a sequence.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flotilla_coordinator.data.chat_turns import Chat, checked_text
from flotilla_coordinator.ledger.records import FinishedSample, TokenSpan
from flotilla_coordinator.rollouts.tool_calls import Answer, ToolFormat, read_answer
from flotilla_core.errors import InvalidConfig
from flotilla_data.chat_template import Conversation
from flotilla_data.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Render = Callable[[Sequence[Conversation]], Awaitable[list[str | InvalidConfig]]]
"""Renders conversations by the template of the model; each gives its text, or why the template refuses it."""

WHERE = "the messages of the environment"
CHARACTERS_PER_TOKEN = 16
"""A text with more characters for each token of the limit has no room, and is not encoded."""
TEMPLATE, REASONING, END, HISTORY, TOOLS, THREAD = (
    "template",
    "reasoning",
    "end_token",
    "history",
    "tools",
    "thread",
)
"""Reasons of branches: the template writes a turn otherwise, or leaves its thoughts out, or ends it otherwise; the
environment rewrote the history, has other tools, or began another thread."""


@dataclass(frozen=True, eq=False)
class _Turn:
    """One response of the policy."""

    token_ids: np.ndarray
    said: str
    """Its text without the token that ends it."""
    end: str
    """The text of the token that ended it; empty where it was cut off."""
    answer: Answer
    message: dict[str, Any]


@dataclass(frozen=True)
class TokenSequence:
    """A sequence of an episode, with one row in each column for each token after its prompt."""

    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    """0 where the policy did not write."""
    trained: np.ndarray
    """The tokens that the policy wrote in this sequence."""
    spans: tuple[TokenSpan, ...]
    turn_ends: dict[int, int]
    """The place after the last token of each turn in this sequence, 0 of one without tokens, by the number of the turn.
    """


@dataclass
class _Sequence:
    """One growing sequence of tokens.

    Thousands of episodes are in flight: a number takes four bytes here, and in a list ten times as many.
    """

    prompt: array[int]
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    trained: bytearray = field(default_factory=bytearray)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[TokenSpan] = field(default_factory=list)
    turn_ends: dict[int, int] = field(default_factory=dict)

    def hear(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.trained += bytes(len(token_ids))
        self.logprobs.frombytes(bytes(4 * len(token_ids)))

    def write(self, piece: FinishedSample, turn: int) -> None:
        written = len(self.token_ids)
        self.spans += (
            TokenSpan(span.version, written + span.start, written + span.end) for span in piece.spans
        )
        self.token_ids.frombytes(piece.token_ids.astype(np.int32, copy=False).tobytes())
        self.trained += b"\1" * len(piece.token_ids)
        if piece.logprobs is not None:
            self.logprobs.frombytes(piece.logprobs.astype(np.float32, copy=False).tobytes())
        self.turn_ends[turn] = len(self.token_ids) if len(piece.token_ids) else 0

    def whole(self) -> TokenSequence:
        return TokenSequence(
            prompt_token_ids=np.array(self.prompt, np.int32),
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            trained=np.array(self.trained, np.bool_),
            spans=tuple(self.spans),
            turn_ends=self.turn_ends,
        )


@dataclass
class _Thread:
    """One growing history of an episode."""

    history: Messages = field(default_factory=list)
    tools: Tools = None
    shown: str = ""
    """What the template wrote before the last turn."""
    last: _Turn | None = None
    sequence: _Sequence | None = None
    """The sequence with the last turn; None before the next turn begins one."""
    heard: list[int] = field(default_factory=list)
    """The tokens that the next turn follows: the context after the last one, or a whole prompt."""

    @property
    def tokens(self) -> int:
        """The number of tokens before the next turn."""
        before = self.sequence
        return len(self.heard) + (0 if before is None else len(before.prompt) + len(before.token_ids))


@dataclass(frozen=True)
class Written:
    """A turn of the policy, as an environment gets it."""

    message: dict[str, Any]
    unparsed: str = ""
    """The reason why a call in it could not be read."""


class Transcript:
    """Makes the sequences of one episode from messages and sampled tokens."""

    def __init__(self, tokenizer: Tokenizer, render: Render, most_tokens: int) -> None:
        """`most_tokens` is the limit of a sequence, prompt and turns together."""
        self._tokenizer = tokenizer
        self._render = render
        self._most_tokens = most_tokens
        self._form = ToolFormat.of_template(tokenizer.template_source)
        self._threads: dict[str, _Thread] = {}
        self._turns: list[_Turn] = []
        self._sequences: list[_Sequence] = []
        self.branches: Counter[str] = Counter()
        """The branches so far, by their reasons."""
        self.record: list[dict[str, Any]] = []
        """The conversation, to be shown: messages, turns, and where a history was rewritten."""

    @property
    def turns(self) -> int:
        """Return the number of turns so far."""
        return len(self._turns)

    @property
    def unparsed(self) -> int:
        """Return the number of turns with a call that could not be read."""
        return sum(bool(turn.answer.unparsed) for turn in self._turns)

    @property
    def sequences(self) -> list[TokenSequence]:
        """Return the sequences with the turns of the policy, in the order of their first turns."""
        return [sequence.whole() for sequence in self._sequences]

    async def hear(
        self, messages: Messages, tools: Tools = None, *, afresh: bool = False, thread: str = ""
    ) -> int:
        """Take the messages before a turn; return for how many tokens there is room, 0 where there is none.

        They follow those of the thread, or `afresh` take their place. Raise InvalidConfig where the template refuses
        them or leaves a part of them out.
        """
        own = self._threads.setdefault(thread, _Thread())
        history = messages if afresh else [*own.history, *messages]
        (text,) = await self._render([Conversation(history, tools, where=WHERE)])
        if isinstance(text, InvalidConfig):
            raise text
        if isinstance(text := checked_text(text, Chat(messages, tools, WHERE)), InvalidConfig):
            raise text
        if len(text) > CHARACTERS_PER_TOKEN * self._most_tokens:
            return 0
        place = self._place_after(own, text)
        reason = ""
        if place is None:
            reason = self._why_a_branch(own, history, tools, text)
            own.sequence, own.heard = None, await self._prompt(history, tools, text)
        else:
            own.heard = self._encoded(text[place:], after=own.last.end if own.last else "")
        self._note(own, history, tools, thread, reason)
        own.history, own.tools, own.shown = history, tools, text
        if reason:
            self.branches[reason] += 1
        return max(self._most_tokens - own.tokens, 0)

    def prompt(self, thread: str = "") -> np.ndarray:
        """Return all tokens before the next turn of a thread."""
        own = self._threads[thread]
        before = own.sequence
        parts = [own.heard] if before is None else [before.prompt, before.token_ids, own.heard]
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def wrote(
        self, piece: FinishedSample, thread: str = "", *, state: int = 0, shown: Callable[[str], str] = str
    ) -> Written:
        """Take the turn that the policy sampled after `prompt`; return its message, with the text that is `shown`.

        `state` is the key of the state in which it was asked; 0 for none.
        """
        own = self._threads[thread]
        if own.sequence is None:
            own.sequence = _Sequence(array("i", own.heard))
            self._sequences.append(own.sequence)
        else:
            own.sequence.hear(own.heard)
        own.heard = []
        own.sequence.write(piece, len(self._turns))
        own.last = self._turn(piece, own.tools, shown)
        self._turns.append(own.last)
        message = own.last.message
        own.history = [*own.history, message]
        versions = dict.fromkeys(str(span.version) for span in piece.spans)
        self.record.append(
            _labelled(
                message,
                thread,
                turn=len(self._turns),
                tokens=len(piece.token_ids),
                versions=[*versions],
                cut_off=piece.truncated,
                unparsed=own.last.answer.unparsed,
                state=f"{state % 2**64:016x}" if state else "",
            )
        )
        return Written(message, own.last.answer.unparsed)

    def _turn(self, piece: FinishedSample, tools: Tools, shown: Callable[[str], str]) -> _Turn:
        token_ids = piece.token_ids.tolist()
        ended = not piece.truncated and bool(token_ids) and token_ids[-1] in self._tokenizer.eos_ids
        end = self._tokenizer.decode(token_ids[-1:], skip_special=False) if ended else ""
        said = shown(self._tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special=False))
        answer = read_answer(said, self._form if tools else ToolFormat.NONE)
        return _Turn(piece.token_ids, said, end, answer, answer.message(len(self._turns) + 1))

    def _place_after(self, own: _Thread, text: str) -> int | None:
        """Return where the context after the last turn begins; None where the text does not go on from it."""
        if own.sequence is None or own.last is None or not text.startswith(own.shown):
            return None
        found = self._beginning(text[len(own.shown) :], [own.last])
        return None if found is None else len(own.shown) + found[1]

    def _beginning(self, rest: str, turns: Sequence[_Turn]) -> tuple[_Turn, int] | None:
        """Return the first of these turns with which a text begins, and where the text goes on after it."""
        found, end = self._first_end(rest)
        for turn in turns:
            if rest.startswith(turn.said + (turn.end or end)):
                return turn, len(turn.said) + len(turn.end)
        if found is None:
            return None
        plain, called = (read_answer(rest[:found], form).bare for form in (ToolFormat.NONE, self._form))
        for turn in turns:
            if turn.end in ("", end) and turn.answer.bare == (called if turn.answer.calls else plain):
                return turn, found + len(turn.end)
        return None

    def _first_end(self, rest: str) -> tuple[int | None, str]:
        ends = [(place, end) for end in self._tokenizer.end_texts if end and (place := rest.find(end)) >= 0]
        return min(ends, default=(None, ""))

    def _why_a_branch(self, own: _Thread, history: Messages, tools: Tools, text: str) -> str:
        """Return why a history does not go on from the last turn of its thread; empty where nothing was there."""
        if own.last is None:
            return THREAD if self._sequences else ""
        if history[: len(own.history)] != own.history:
            return HISTORY
        if tools != own.tools:
            return TOOLS
        if any("</think>" in message["content"] for message in own.history if message["role"] == "assistant"):
            return REASONING
        rest = text[len(own.shown) :] if text.startswith(own.shown) else ""
        _, end = self._first_end(rest)
        return END if rest and own.last.end not in ("", end) else TEMPLATE

    async def _prompt(self, history: Messages, tools: Tools, text: str) -> list[int]:
        """Return the tokens of a whole history: those of turns that it keeps as they were sampled."""
        tokens: list[int] = []
        place, after = 0, ""
        for begin, turn, end in await self._kept(history, tools, text):
            tokens += self._encoded(text[place:begin], after=after)
            tokens += turn.token_ids.tolist()
            place, after = end, turn.end
        return tokens + self._encoded(text[place:], after=after)

    async def _kept(self, history: Messages, tools: Tools, text: str) -> list[tuple[int, _Turn, int]]:
        """Return the turns that a history keeps, each with its begin and end in the text of the history."""
        places = [place for place, message in enumerate(history) if message["role"] == "assistant"]
        if not places or not self._turns:
            return []
        kept: list[tuple[int, _Turn, int]] = []
        left = self._turns
        starts = await self._render([Conversation(history[:place], tools) for place in places])
        for place, before in zip(places, starts, strict=True):
            if isinstance(before, InvalidConfig) or not text.startswith(before):
                continue  # the template writes this turn otherwise where more follows
            begin, message = len(before), history[place]
            same = [turn for turn in left if turn.message is message]
            same = same or [turn for turn in left if turn.message == message]
            found = self._beginning(text[begin:], same)
            if found is not None and (not kept or kept[-1][2] <= begin):
                kept.append((begin, found[0], begin + found[1]))
                left = [turn for turn in left if turn is not found[0]]
        return kept

    def _encoded(self, text: str, *, after: str) -> list[int]:
        """Return the tokens of a text as they are after a token with the text `after`."""
        if not text:
            return []
        if after:
            # Some tokenizers put a space before a text that begins, or take one away after a special token.
            first, *rest = self._tokenizer.encode(after + text)
            if first in self._tokenizer.eos_ids:
                return rest
        return self._tokenizer.encode(text)

    def _note(self, own: _Thread, history: Messages, tools: Tools, thread: str, reason: str) -> None:
        """Record what is heard, to be shown."""
        kept = 0
        while kept < min(len(history), len(own.history)) and history[kept] == own.history[kept]:
            kept += 1
        if reason:
            self.record.append(_labelled({"branch": reason, "kept": kept}, thread))
        if tools and tools != own.tools:
            self.record.append(_labelled({"tools": [*tools]}, thread))
        self.record += [_labelled(message, thread) for message in history[kept:]]


def _labelled(entry: dict[str, Any], thread: str, **facts: Any) -> dict[str, Any]:
    return entry | {name: value for name, value in {"thread": thread, **facts}.items() if value}
