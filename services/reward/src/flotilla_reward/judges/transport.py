"""The way from a judge to its model, wherever that answers.

Invariants: an answer is a completion or none: what is refused is no verdict, and a model that is away has said nothing.
Nobody waits in vain behind a request that had no answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flotilla_core.errors import Unavailable
from flotilla_reward.judges.form import Asked

LONGEST_SHOWN = 300


class Refused(Exception):
    """The model's side does not take the request, or its answer is no completion; no verdict."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Completion:
    """The text that a model wrote."""

    content: str
    tokens: int
    """Tokens of the prompt and of the answer, as who answers counts them."""


class Transport(Protocol):
    """The way to the model of a judge."""

    @property
    def model(self) -> str:
        """The model, as versions of verdicts name it."""

    @property
    def place(self) -> str:
        """The place of the model, for messages."""

    @property
    def about(self) -> list[Any]:
        """All that its answers depend on beside its name and the messages."""

    async def check(self) -> None:
        """Raise where it can be asked of nothing, whatever the messages are."""

    def shown(self, text: str) -> str:
        """Return a text of its as it may be told."""

    async def complete(self, asked: Asked, response_format: Mapping[str, Any], since: float) -> Completion:
        """Return what the model writes; it was needed `since` then.

        Raise `Refused` without a completion, `Unavailable` without a model.
        """


class Queue:
    """The requests to one place, so many at the same time."""

    def __init__(self, concurrency: int) -> None:
        self.places = asyncio.Semaphore(concurrency)
        self._away_at = -math.inf
        self._why_away = ""

    def require_answers(self, since: float, judge: str, place: str) -> None:
        """Raise where a request had no answer, however often it was sent, after this one was needed."""
        if self._away_at > since:
            raise away(judge, place, self._why_away)

    def had_no_answer(self, why: str) -> None:
        """Record that a request had no answer now."""
        self._away_at, self._why_away = asyncio.get_running_loop().time(), why


def away(judge: str, place: str, why: str) -> Unavailable:
    """Return the error of a judge that does not answer."""
    return Unavailable(f"judge {judge} is away", where=place, why=why)


def shortened(text: str) -> str:
    """Return the beginning of a text, for a message."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
