"""Renders conversations by a model's chat template, which is a program of another author.

Invariants: a template runs in a process within bounds (`flotilla_data.template_child`), one for all
templates of this process; the sandbox there keeps it from files and calls, and the bounds from endless loops and from
memory. A conversation that the template refuses is one error among the results. A template that passes its bounds is an
error for all, because each further conversation could cost as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_core.bounded_process import BoundedProcess, Bounds, OutOfBounds
from flotilla_core.errors import FailedPrecondition, InvalidConfig

AT_ONCE = 256
MEMORY_BYTES = 1 << 30
CPU_S = 5.0
"""A conversation takes less than a millisecond."""
MOST_ANSWER_BYTES = 96 << 20
_CHILD = BoundedProcess("flotilla_data.template_child:render", Bounds(MEMORY_BYTES, CPU_S, MOST_ANSWER_BYTES))


@dataclass(frozen=True)
class Conversation:
    """Messages to render."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    begin_answer: bool = True
    """True ends the text where the assistant begins to answer."""
    where: str = ""
    """The place of the messages, for errors."""


class ChatTemplate:
    """The template of one model folder."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._where = where

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        begin_answer: bool = True,
    ) -> str:
        """Return the text of one conversation."""
        (text,) = self.render_many([Conversation(messages, tools, begin_answer)])
        if isinstance(text, InvalidConfig):
            raise text
        return text

    def render_many(self, conversations: Sequence[Conversation]) -> list[str | InvalidConfig]:
        """Return the text of each conversation, or why the template refuses it."""
        found: list[str | InvalidConfig] = []
        for start in range(0, len(conversations), AT_ONCE):
            found += self._rendered(conversations[start : start + AT_ONCE])
        return found

    async def render_beside(self, conversations: Sequence[Conversation]) -> list[str | InvalidConfig]:
        """Return what `render_many` does, while the event loop runs."""
        if len(conversations) <= AT_ONCE:
            try:
                return self._texts(conversations, await _CHILD.ask_beside(self._question(conversations)))
            except OutOfBounds:
                pass  # To be asked again, for the one that takes so much.
        return await asyncio.to_thread(self.render_many, conversations)

    def _rendered(self, conversations: Sequence[Conversation]) -> list[str | InvalidConfig]:
        try:
            return self._texts(conversations, _CHILD.ask(self._question(conversations)))
        except OutOfBounds as error:
            if len(conversations) > 1:  # Ask again, to name the one that takes so much.
                return [text for one in conversations for text in self._rendered([one])]
            raise FailedPrecondition(
                "the chat template passes its bounds",
                where=self._place(conversations[0]),
                why=str(error),
                next_step="mend chat_template of the model folder, or leave these messages out",
            ) from None

    def _question(self, conversations: Sequence[Conversation]) -> dict[str, Any]:
        return {
            "source": self._source,
            "special_tokens": self._special_tokens,
            "where": self._where,
            "conversations": [
                {
                    "messages": list(one.messages),
                    "tools": one.tools,
                    "add_generation_prompt": one.begin_answer,
                }
                for one in conversations
            ],
        }

    def _texts(self, conversations: Sequence[Conversation], told: Any) -> list[str | InvalidConfig]:
        return [
            text if why is None else self._refusal(one, why)
            for one, (text, why) in zip(conversations, told, strict=True)
        ]

    def _refusal(self, one: Conversation, why: str) -> InvalidConfig:
        return InvalidConfig("the chat template refuses the messages", where=self._place(one), why=why)

    def _place(self, one: Conversation) -> str:
        return f"{one.where}; {self._where}" if one.where else self._where
