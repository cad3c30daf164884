"""Renders chats by the model's template, and finds what the model has to write in them.

Invariants: a turn is what the template writes after the point at which the model begins to answer, up to the token that
ends the turn; nothing else is learned. Turns share a sequence only where the template writes the earlier ones in the
later chat as the model wrote them, with their end tokens; another template gets a sequence for each. What it leaves
out of a chat is refused, never lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flotilla_core.errors import InvalidConfig
from flotilla_data.chat_template import Conversation
from flotilla_data.chats import THOUGHTS, WEIGHT, Messages, trains
from flotilla_data.tokenizer import Tokenizer

Tools = list[dict[str, Any]] | None
THINKING = re.compile(r"</?think(?:ing)?>")
AS_TEXT = (
    "write the answer as text, just as the model should write it after the messages before it: those to a column "
    "prompt, the text to a column answer (chosen and rejected for pairs)"
)
AS_CONTENT = (
    "write the call into its message's content, just as the model should write it, and leave out tool_calls"
)
AS_THINKING = "write it into the content of its message, before the answer, between <think> and </think>"
AS_PROMPT = (
    "write this into a message that the template keeps, such as the user's, or the whole prompt as text"
)


@dataclass(frozen=True)
class ChatText:
    """A text of a chat, and the parts of it that the model has to write."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each part, ascending; the last one ends with the text."""

    @property
    def cuts(self) -> list[int]:
        """The places at which parts meet."""
        return [place for span in self.spans for place in span][:-1]

    @property
    def pieces(self) -> list[str]:
        """The parts in their order; the first one is not the model's, the second is, and so on in turns."""
        edges = [0, *self.cuts, len(self.text)]
        return [self.text[begin:end] for begin, end in pairwise(edges)]


@dataclass(frozen=True)
class Chat:
    """Messages that end where the model begins to answer."""

    messages: Messages
    tools: Tools
    where: str


def prompt_text(chat: Chat, tokenizer: Tokenizer) -> str:
    """Return the text that the model continues."""
    (text,) = prompt_texts([chat], tokenizer)
    if isinstance(text, InvalidConfig):
        raise text
    return text


def prompt_texts(chats: Sequence[Chat], tokenizer: Tokenizer) -> list[str | InvalidConfig]:
    """Return the text of each chat, or why it has none."""
    asked = [Conversation(_plain(one.messages), one.tools, where=one.where) for one in chats]
    return [
        _refusal(text) if isinstance(text, InvalidConfig) else checked_text(text, one)
        for one, text in zip(chats, tokenizer.render_chats(asked), strict=True)
    ]


def checked_text(text: str, chat: Chat) -> str | InvalidConfig:
    """Return the text, unless the template left something of the chat out."""
    try:
        _require_tools(text, chat.tools, chat.where)
        for message in chat.messages:
            # What an assistant thought earlier is left out on purpose by templates of models that think.
            if message["role"] != "assistant":
                whose = f"a message of {message['role']!r}"
                _require(text, [message["content"]], whose, chat.where, AS_PROMPT)
            _require(text, _called(message), "a call of a tool", chat.where, AS_CONTENT)
    except InvalidConfig as error:
        return error
    return text


def learned_texts(
    prompt: Messages, given: Messages, tools: Tools, tokenizer: Tokenizer, what: str, where: str
) -> list[ChatText]:
    """Return the texts of a chat with all turns of `given` that are learned, in their order."""
    turns = [
        _turn([*prompt, *given[:place]], message, tools, tokenizer, what, where)
        for place, message in enumerate(given)
        if trains(message)
    ]
    found: list[ChatText] = []
    for text, begin, ended in reversed(turns):
        last = found[-1] if found else None
        if ended and last is not None and last.text.startswith(text):
            found[-1] = ChatText(last.text, ((begin, len(text)), *last.spans))
        else:
            found.append(ChatText(text, ((begin, len(text)),)))
    return found[::-1]


def _turn(
    before: Messages, message: dict[str, Any], tools: Tools, tokenizer: Tokenizer, what: str, where: str
) -> tuple[str, int, bool]:
    """Return the text of a chat up to the end of a turn, where the turn begins, and whether an end token ends it."""
    start = prompt_text(Chat(before, tools, where), tokenizer)
    whole = _rendered([*before, message], tools, tokenizer, where, begin_answer=False)
    if not whole.startswith(start):
        raise InvalidConfig(
            f"the chat template does not write {what} after the prompt",
            where=where,
            why="what it writes with the answer does not begin with what it writes without",
            next_step=AS_TEXT,
        )
    turn, ended = _ended(whole[len(start) :], tokenizer.end_texts)
    thoughts = [str(message.get(key, "")) for key in THOUGHTS]
    _require(turn, thoughts, "what an assistant thought", where, AS_THINKING)
    _require(turn, _called(message), "a call of a tool", where, AS_CONTENT)
    _require(turn, THINKING.split(message["content"]), f"{what}, a message of 'assistant',", where, AS_TEXT)
    return start + turn, len(start), ended


def _ended(text: str, ends: Sequence[str]) -> tuple[str, bool]:
    """Cut a turn after the token that ends it, if the template writes one; what comes after it, no model says."""
    found = [place + len(end) for end in ends if end and (place := text.find(end)) >= 0]
    return (text[: min(found)], True) if found else (text.rstrip(), False)


def _rendered(
    messages: Messages, tools: Tools, tokenizer: Tokenizer, where: str, *, begin_answer: bool
) -> str:
    asked = [Conversation(_plain(messages), tools, begin_answer, where)]
    (text,) = tokenizer.render_chats(asked)
    if isinstance(text, InvalidConfig):
        raise _refusal(text)
    return text


def _plain(messages: Messages) -> Messages:
    return [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]


def _refusal(error: InvalidConfig) -> InvalidConfig:
    """Return the refusal of a template, with a way."""
    return InvalidConfig(
        error.what,
        where=error.where,
        why=error.why,
        next_step=error.next_step
        or "bring the messages into the order and the roles that this model's template takes (a system message may "
        "go into the first user's message), or write the chat as text to the columns prompt and answer",
    )


def _called(message: dict[str, Any]) -> Iterator[str]:
    """Return what the calls of a message must leave in the text."""
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        arguments = call["function"]["arguments"]
        for value in arguments.values() if isinstance(arguments, dict) else ():
            yield value if isinstance(value, str) else ""


def _require_tools(text: str, tools: Tools, where: str) -> None:
    for tool in tools or ():
        if tool["function"]["name"] not in text:
            raise InvalidConfig(
                f"the chat template leaves out the tool {tool['function']['name']!r}",
                where=where,
                why="the model's template has no place for tools",
                next_step="describe the tools in a system message and leave out the column with the tools, or take a "
                "model whose template writes tools",
            )


def _require(text: str, wanted: Iterable[str], whose: str, where: str, way: str) -> None:
    """Refuse a text in which something of a message is missing; templates write some texts as JSON."""
    for part in wanted:
        own = part.strip()
        if own and own not in text and json.dumps(own, ensure_ascii=False)[1:-1] not in text:
            raise InvalidConfig(
                f"the chat template leaves out a part of {whose}",
                where=where,
                why=f"{own!r:.100} is not in what it writes",
                next_step=way,
            )
