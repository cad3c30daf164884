"""What a reward sees, and how a reward says that it cannot judge."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sample(NamedTuple):
    """One response with what the data set says about it."""

    prompt: str
    response: str
    answer: str
    info: dict[str, Any]


class CannotScore(Exception):
    """The sample cannot be judged, for example because its answer is missing: an error, never a score."""
