"""The interface of a tracker, and the facts that it is told of a run.

Invariants: a tracker is used by one process and one thread. Every call may raise or hang; whoever calls knows what was
taken, and tells the rest again. Steps count what is done, so that the first is 1 and an evaluation before training has
step 0, as in plots and in `run watch`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = ("prompt", "response", "answer", "reward", "response_tokens", "truncated")
"""The columns that a table shows of a sample, where its file has them."""
LONGEST_CELL = 2000
SECRET_NAME = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL", re.IGNORECASE)
CREDENTIALS = re.compile(r"(\w+://)[^/\s@]+@")
SHORTEST_SECRET = 4


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run for every tracker."""

    run_id: str
    name: str
    directory: Path
    """The run directory; files of a tracker that has no place of its own go below it."""
    config: Mapping[str, Any]
    """The configuration of the run, without its trackers."""
    continued: bool = False
    """True where this tracker has shown something of the run before."""

    @property
    def own_folder(self) -> Path:
        """The folder for state and files of trackers."""
        return self.directory / "trackers"

    @property
    def parameters(self) -> dict[str, Any]:
        """The configuration as one level of dotted keys."""
        return dict(_flat(self.config))


class Tracker(ABC):
    """One run in one tracker."""

    @abstractmethod
    def start(self, facts: RunFacts) -> str:
        """Open the line of the run, or continue it; return where people find it, empty where nobody can say."""

    @abstractmethod
    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, and the moment they were written, in seconds since the epoch."""

    @abstractmethod
    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Take a table of samples with the columns COLUMNS."""

    def rewind(self, step: int) -> bool:
        """Forget what was logged of this step and later ones, which the run makes again; return whether it did.

        A tracker that cannot forget keeps both; the metric `lineage` tells them apart.
        """
        return False

    @abstractmethod
    def finish(self, outcome: str) -> None:
        """Close the line of a run that has ended: succeeded, stopped or failed."""


def rows_of(samples: Sequence[Mapping[str, Any]], most: int) -> list[list[Any]]:
    """Return rows for a table: of samples from the best reward to the worst, evenly over their order."""
    ranked = sorted(samples, key=lambda sample: float(sample.get("reward") or 0.0), reverse=True)
    if len(ranked) > most:
        last = len(ranked) - 1
        ranked = [ranked[round(index * last / max(most - 1, 1))] for index in range(most)]
    return [[_cell(sample.get(column)) for column in COLUMNS] for sample in ranked]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 4]} ..."


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [pair for key, below in value.items() for pair in _flat(below, f"{prefix}{key}.")]
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return [pair for index, below in enumerate(value) for pair in _flat(below, f"{prefix}{index}.")]
    return [(prefix.removesuffix("."), value)]


def without_secrets(text: str, environment: Mapping[str, str], more: Sequence[str] = ()) -> str:
    """Return a text without the values of variables that hold secrets, and without credentials in addresses."""
    named = [value for name, value in environment.items() if SECRET_NAME.search(name)]
    for secret in sorted({*named, *more}, key=len, reverse=True):
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return CREDENTIALS.sub(r"\1***@", text)
