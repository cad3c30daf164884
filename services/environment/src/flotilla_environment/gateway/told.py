"""Says what a client is told of a turn, in whatever dialect: its text and calls, its tokens, and events of streams.

Invariant: what a client sends again of it, in the dialect in which it was told, is read as the message
`Told.message`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flotilla_environment.gateway import fields
from flotilla_environment.gateway.dialect import Completed, Completion


@dataclass(frozen=True)
class Told:
    """A turn as its client is told of it."""

    content: str
    """The text without calls, up to the first of the texts that end a turn, and without that one."""
    calls: tuple[dict[str, str], ...]
    stop: str
    """The text that ended the turn; empty where another end came."""

    @property
    def message(self) -> dict[str, Any]:
        """Return the message as it is read in a later request."""
        return fields.assistant(self.content, [*self.calls])


def told(asked: Completion, done: Completed) -> Told:
    """Return what a client is told."""
    calls = tuple(
        call | {"arguments": fields.arguments(call["arguments"], "arguments")} for call in done.calls
    )
    found = [(place, stop) for stop in asked.stop if (place := done.content.find(stop)) >= 0]
    if not found:
        return Told(done.content, calls, "")
    place, stop = min(found, key=lambda one: one[0])
    return Told(done.content[:place], calls, stop)


def logprobs(done: Completed) -> list[dict[str, Any]]:
    """Return the log-probabilities of the tokens of a turn, as both dialects of OpenAI's write them.

    They are those of every token: of calls, and of the one that ends the turn, too.
    """
    return [
        {"token": one.text, "logprob": one.logprob, "bytes": [*one.raw], "top_logprobs": []}
        for one in done.tokens
    ]


def tokens(asked: Completion, done: Completed) -> dict[str, Any]:
    """Return what no vendor has a place for: the ids of all tokens of a turn, and their log-probabilities."""
    if not asked.logprobs:
        return {}
    return {
        "token_ids": [one.token_id for one in done.tokens],
        "token_logprobs": [one.logprob for one in done.tokens],
    }


def event(data: dict[str, Any] | str, name: str = "") -> bytes:
    """Return a server-sent event. Its data is ASCII: some clients end a line at other characters, such as U+2028."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {text}\n\n".encode()
