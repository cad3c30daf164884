"""The three ways in which scoring one sample by one reward ends.

Invariants: they never mix. A value is finite; a failure or a timeout carries no number that could be mistaken
for a score.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """A finite number."""

    value: float


@dataclass(frozen=True)
class Failure:
    """The reward raised, returned something that is not a finite number, or its process died."""

    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Timeout:
    """The limit passed; the process that ran the reward was killed."""

    limit_s: float


Outcome = Value | Failure | Timeout


def judge(returned: object) -> Value | Failure:
    """What a reward returned, as a value if it is one."""
    if not isinstance(returned, numbers.Real):
        return Failure(f"returned {returned!r:.200} of type {type(returned).__name__}, expected a number")
    try:
        value = float(returned)
    except OverflowError:
        return Failure("returned an integer too large for a float")
    if not math.isfinite(value):
        return Failure(f"returned {value}, expected a finite number")
    return Value(value)
