"""The files of a run as a tracker reads them, and a tracker that notes what it gets."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_core.config import TensorBoardConfig, TrackerConfig
from flotilla_trackers.feed import Feed
from flotilla_trackers.tracker import RunFacts, Tracker


class RunFiles:
    """The lines of a run, written a second apart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seconds = itertools.count(1000.0)

    def metrics(self, step: int, **values: float) -> None:
        """Add the line of a step."""
        self._append("metrics", {"step": step, **values})

    def evaluation(self, step: int, accuracy: float) -> None:
        """Add the line of an evaluation after so many steps."""
        self._append("evaluations", {"step": step, "accuracy": accuracy})

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"time": next(self._seconds)}) + "\n")


class Noted(Tracker):
    """A tracker that notes what it is told, and raises at a step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.facts: RunFacts | None = None
        self.told: list[Any] = []

    def start(self, facts: RunFacts) -> str:
        self.facts = facts
        return "here"

    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("away")
        self.told.append((step, dict(metrics)))

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        self.told.append((step, rows))

    def rewind(self, step: int) -> bool:
        self.told.append(("rewind", step))
        return True

    def finish(self, outcome: str) -> None:
        self.told.append(outcome)


def feed(directory: Path, tracker: Tracker, config: TrackerConfig | None = None) -> None:
    """Give a run that has ended to a tracker."""
    facts = RunFacts("run-1", "run", directory, {"steps": 3})
    config = TensorBoardConfig() if config is None else config
    Feed(tracker, facts, config, "tensorboard", lambda **_: None).run(lambda _: "succeeded")
