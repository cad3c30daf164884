"""The process of a tracker whose client is the test's: it takes, raises or hangs, as a file of the run says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_core.config import WandbConfig
from flotilla_trackers import feed
from flotilla_trackers.tracker import RunFacts, Tracker


class Scripted(Tracker):
    """Writes what it takes to `taken` of the run directory."""

    def __init__(self, config: WandbConfig) -> None:
        self._directory = Path()

    def start(self, facts: RunFacts) -> str:
        self._directory = facts.directory
        return "http://nowhere/run"

    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        behaviour = (self._directory / "behaviour").read_text()
        if behaviour == "hang":
            time.sleep(1000)
        if behaviour == "raise":
            raise PermissionError(f"the key {os.environ['WANDB_API_KEY']} is refused")
        sys.stdout.write("what a client prints\n")
        with (self._directory / "taken").open("a") as file:
            file.write(f"{step} {metrics}\n")

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """There are none."""

    def finish(self, outcome: str) -> None:
        with (self._directory / "taken").open("a") as file:
            file.write(f"{outcome}\n")


if __name__ == "__main__":
    feed.ADAPTERS["wandb"] = (WandbConfig, Scripted)
    feed.LOOK_EVERY_S = 0.02
    feed.LONGEST_CALL_S = 0.3
    sys.exit(feed.main())
