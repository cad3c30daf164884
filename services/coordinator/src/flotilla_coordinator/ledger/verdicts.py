"""Verdicts: how the rewards of a run judged one sample, by which verifiers, and why there is no score.

Invariants: verdicts are in the order of the run's rewards, but for one that failed, which nothing follows. On disk each
is a JSON object without what is empty. Only a verdict that is scored or unverifiable has a value.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import PurePath
from typing import Any


class Said(StrEnum):
    """The kind of a verdict, by its name on disk and on the wire."""

    SCORED = "scored"
    UNVERIFIABLE = "unverifiable"
    """The response made the verifier fail; the run says what that is worth."""
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class TermVerdict:
    """The verdict of one reward on one sample."""

    reward: str
    """Its name in the configuration; empty where a failure is that of no reward."""
    outcome: Said = Said.SCORED
    value: float | None = None
    """The value before its weight; of an unverifiable response the one that the run gives it, if any."""
    parts: dict[str, float] = field(default_factory=dict)
    """What the verifier said beside it."""
    extracted: str | None = None
    """The answer that the verifier read in the response."""
    version: str = ""
    """The release and the number of the rules of a built-in reward, or the digest of a function's file."""
    seconds: float = 0.0
    message: str = ""
    """The reason why there is no score."""
    file: str = ""
    line: int = 0
    """The line of the user's code that raised; 0 where there is none."""

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> TermVerdict:
        """Return the verdict of a record; what a later Flotilla wrote beside it does not count."""
        known = {one.name: recorded[one.name] for one in fields(cls) if one.name in recorded}
        return cls(**{"reward": ""} | known | {"outcome": Said(recorded.get("outcome", Said.SCORED))})

    def record(self) -> dict[str, Any]:
        """Return it as it is kept on disk."""
        whole = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: value for name, value in whole.items() if value or (name == "value" and value is not None)
        }


def to_text(verdicts: Sequence[TermVerdict]) -> str:
    """Encode verdicts for the ledger; none are an empty text."""
    if not verdicts:
        return ""
    return json.dumps([one.record() for one in verdicts], ensure_ascii=False, separators=(",", ":"))


def from_text(text: str) -> tuple[TermVerdict, ...]:
    """Decode verdicts of the ledger."""
    return tuple(map(TermVerdict.of, json.loads(text))) if text else ()


def named_parts(verdicts: Iterable[TermVerdict]) -> list[tuple[str, float]]:
    """Return each value under the name of its reward, followed by its parts as `reward[part]`."""
    found = []
    for one in verdicts:
        if one.value is not None:
            found.append((one.reward, one.value))
        found += [(f"{one.reward}[{name}]", value) for name, value in one.parts.items()]
    return found


def is_unverifiable(verdicts: Iterable[TermVerdict]) -> bool:
    """Return whether the response made a verifier fail."""
    return any(one.outcome is Said.UNVERIFIABLE for one in verdicts)


def extracted(verdicts: Iterable[TermVerdict]) -> str | None:
    """Return the answer that the first reward read that says what it read."""
    return next((one.extracted for one in verdicts if one.extracted is not None), None)


def part_means(samples: Iterable[Sequence[TermVerdict]]) -> dict[str, float]:
    """Return the means of the values of several rewards, and of their parts as `reward[part]`.

    A mean is over the samples of which the verifier said it. A reward that is there twice has a number.
    """
    found: dict[str, list[float]] = {}
    for verdicts in samples:
        seen: Counter[str] = Counter()
        for one in verdicts:
            name = PurePath(one.reward).name
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}#{seen[name]}"
            if len(verdicts) > 1 and one.value is not None:
                found.setdefault(name, []).append(one.value)
            for part, value in one.parts.items():
                found.setdefault(f"{name}[{part.replace('/', '_')}]", []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}
