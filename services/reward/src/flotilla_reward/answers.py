"""Answers of workers about responses, and the pool of those workers.

Invariants: a value is finite. What no honest worker says costs the worker its life, and is never read as a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flotilla_core.errors import InvalidConfig, unicode_text
from flotilla_reward.catalog import Term
from flotilla_reward.worker import LONGEST_NAME, LONGEST_WHY, MOST_PARTS, Facts
from flotilla_workers.frames import NoAnswer
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import Jail
from flotilla_workers.pool import WorkerPool
from flotilla_workers.process import Failure, Timeout


@dataclass(frozen=True)
class Value:
    """A finite number."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """The finite numbers that a function returned beside it."""
    extracted: str | None = None
    """The answer that the verifier read in the response."""
    unverifiable: str | None = None
    """The way in which the response made the verifier fail; the value is 0 then."""

    @classmethod
    def of(cls, score: float) -> Value:
        """Return what a verifier of this process said."""
        extracted: str | None = getattr(score, "extracted", None)
        return cls(float(score), getattr(score, "parts", {}), extracted and extracted[:LONGEST_WHY])


Outcome = Value | Failure | Timeout
"""A failure or a timeout carries no number that could be mistaken for a score."""
Answer = Value | tuple[Value | Failure, ...]
"""The answer of a worker about one response, or about all of a group."""


class Workers(WorkerPool[Answer]):
    """Workers that score samples, by functions of users in a jail."""

    stopping = False
    """True from the moment on which this service itself ends the workers."""

    def __init__(self, count: int, find_jail: Callable[[], Jail]) -> None:
        super().__init__(count, "flotilla_reward.worker:load", _answer, find_jail)

    async def stop(self) -> None:
        self.stopping = True
        await super().stop()

    def facts(self, term: Term) -> Facts:
        """Return what a function takes that has been loaded."""
        try:
            return Facts() if term.target is None else Facts.of(self.told[term.target.key])
        except (TypeError, ValueError) as error:
            raise InvalidConfig(f"reward {term.name} cannot be loaded", why=str(error)) from error


def _answer(_: Target, said: Any) -> Answer:
    match said:
        case {"each": [*each]}:
            return tuple(_value(one) for one in each)
    value = _value(said)
    if isinstance(value, Failure):
        raise NoAnswer("it is no finite number")
    return value


def _value(said: Any) -> Value | Failure:
    parts: Any = {}
    extracted: str | None = None
    match said:
        case {"unverifiable": str(why)}:
            return Value(0.0, unverifiable=unicode_text(why))
        case {"failed": str(why)}:
            return Failure(unicode_text(why))
        case [value, parts, str(read)]:
            extracted = unicode_text(read)
        case [value, parts]:
            pass
        case value:
            pass
    if not _is_finite(value):
        raise NoAnswer("it is no finite number")
    if not isinstance(parts, dict) or len(parts) > MOST_PARTS or not all(map(_is_finite, parts.values())):
        raise NoAnswer("its parts are no finite numbers with names")
    named = {unicode_text(name[:LONGEST_NAME]): part for name, part in parts.items()}
    return Value(value, named, extracted)


def _is_finite(said: object) -> bool:
    return isinstance(said, float) and math.isfinite(said)
