"""Shows a run in Trackio: in a database on this host, or in a Space.

Invariants: the run has our id as its name, by which Trackio continues it. Trackio writes from a thread of its own, half
a second later; what it has not written when its process is killed is lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_core.config import TrackioConfig
from flotilla_trackers.tracker import COLUMNS, RunFacts, Tracker


class TrackioTracker(Tracker):
    """One run in Trackio.

    Trackio warns by itself of what it cannot write, and raises nothing: its warnings are in the log of the tracker.
    """

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None

    def start(self, facts: RunFacts) -> str:
        config = self._config
        # Trackio reads it when it is imported.
        if config.directory is not None:
            os.environ["TRACKIO_DIR"] = str(config.directory)
        import trackio

        self._run = trackio.init(
            project=config.project,
            name=facts.run_id,
            group=facts.name,
            space_id=config.space_id,
            config=dict(facts.parameters),
            resume="allow",
            embed=False,
            # The fleet has figures of its own; those of this process would be of no use.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if config.space_id is not None:
            return f"Space {config.space_id}"
        folder = "" if config.directory is None else f"TRACKIO_DIR={config.directory} "
        return f"{folder}trackio show --project {config.project!r}"

    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        import trackio

        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step)

    def finish(self, outcome: str) -> None:
        self._run.finish()
