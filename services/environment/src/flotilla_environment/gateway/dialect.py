"""Defines what every dialect of the gateway is read into, and what each answer is written from.

Invariants: a dialect only translates: it keeps nothing between two requests, and does no I/O. Messages and tools are
those that chat templates know, so the history that a client sends again is equal to the one that it was told. What a
dialect cannot carry, or the gateway cannot do, is refused by the name of its field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from flotilla_core.errors import FlotillaError


@dataclass(frozen=True)
class Completion:
    """A turn of the policy that a client asks for."""

    messages: tuple[dict[str, Any], ...]
    """The whole history: `role`, `content` as text, `tool_calls` (`id`, `name`, `arguments` as JSON) and
    `tool_call_id`. Instructions beside the messages are the first one, of the system."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions: `name`, `description` and `parameters`."""
    max_tokens: int = 0
    """0: as the run says."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = True
    """True where a stream tells the counts of tokens at its end."""
    logprobs: bool = False
    """True where the client wants the log-probability of each token, and its id."""


@dataclass(frozen=True)
class Token:
    """One token of a turn."""

    token_id: int
    text: str
    """The bytes as text; a half character is U+FFFD."""
    raw: bytes
    logprob: float


@dataclass(frozen=True)
class Completed:
    """The turn that answers it."""

    id: str
    """One id for one turn: whoever asks for the same turn again gets the same."""
    model: str
    created: int
    """Seconds since 1970."""
    content: str
    """The text without calls."""
    calls: tuple[dict[str, str], ...] = ()
    """Calls of tools: `id`, `name`, and `arguments` as JSON."""
    cut: bool = False
    """True where the turn reached its most tokens."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: tuple[Token, ...] = ()
    """Every token of the turn, where the client asked for log-probabilities."""


class Dialect(Protocol):
    """One API of a vendor."""

    path: str
    """The path of its requests, below the base URL of a session."""

    def read(self, body: dict[str, Any]) -> Completion:
        """Return what a request asks for; raise InvalidRequest, with the name of the field, for what cannot be done."""
        ...

    def answer(self, asked: Completion, done: Completed) -> dict[str, Any]:
        """Return the body of an answer."""
        ...

    def events(self, asked: Completion, done: Completed) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer, each a whole event."""
        ...

    def refusal(self, error: FlotillaError) -> dict[str, Any]:
        """Return the body of an error, as clients of the vendor read it."""
        ...
