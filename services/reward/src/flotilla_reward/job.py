"""A worker's job: the sample to score, the target that scores it, and the three ways in which that ends.

Invariants: a target is plain data and travels as JSON; two targets with equal keys behave alike, so a worker loads
each once. A file that changed on disk is another target. The outcomes never mix: a value is finite; a failure or a
timeout carries no number that could be mistaken for a score.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import numbers
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple


class Sample(NamedTuple):
    """One response with what the data set says about it."""

    prompt: str
    response: str
    answer: str
    info: dict[str, Any]


class CannotScore(Exception):
    """The sample cannot be judged, for example because its answer is missing: an error, never a score."""


class Unreadable(Exception):
    """The response broke a checker of ours: it is worth 0, and that is counted."""


@dataclass(frozen=True)
class Target:
    """The job of a worker: a built-in reward or a function of the user, with its parameters.

    Something that scores samples in a worker.
    """

    kind: Literal["builtin", "file", "entry_point"]
    source: str
    """Name of the built-in, absolute path of the file, or module of the entry point."""
    function: str = ""
    """Name within the file or module."""
    parameters: dict[str, Any] = field(default_factory=dict)
    stamp: str = ""
    """State of the file when the target was made."""

    @cached_property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Value:
    """A finite number."""

    value: float
    unreadable: bool = False
    """The response broke a built-in checker or kept it busy until the limit, and is worth 0 for that."""


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
    """Return the result of a reward as a value, if it is one; an array or tensor of one number is that number."""
    if not isinstance(returned, numbers.Real) and getattr(returned, "shape", None) == ():
        returned = returned.item()  # type: ignore[attr-defined]
    if not isinstance(returned, numbers.Real):
        return Failure(
            f"returned {returned!r:.200} of type {type(returned).__name__}, expected a number{_way_for(returned)}"
        )
    try:
        value = float(returned)
    except OverflowError:
        return Failure("returned an integer too large for a float")
    if not math.isfinite(value):
        return Failure(f"returned {value}, expected a finite number")
    return Value(value)


def _way_for(returned: object) -> str:
    """Return how to make a number of what is often returned in its place."""
    if inspect.iscoroutine(returned):
        returned.close()  # Python warns of one that nobody awaits.
        return ": wrap the call in asyncio.run(...)"
    if isinstance(returned, dict):
        key = next((key for key in ("score", "reward", *returned) if key in returned), "score")
        return f": return one of its values, such as result[{key!r}]"
    if isinstance(returned, list | tuple) and len(returned) == 1:
        return ": a reward scores one response, so return result[0]"
    return ""
