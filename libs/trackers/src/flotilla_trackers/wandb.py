"""Shows a run in Weights & Biases, or writes the files that `wandb sync` sends later.

Invariants: the id of the W&B run is the id of ours, so a resumed run continues its line. W&B takes no step again; so
steps are the metric `step`, over which every other metric is drawn. The client keeps what a server does not take, and
sends it by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_core.config import WandbConfig
from flotilla_trackers.tracker import COLUMNS, RunFacts, Tracker

STEP = "step"


class WandbTracker(Tracker):
    """One run in Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None

    def start(self, facts: RunFacts) -> str:
        import wandb

        config = self._config
        if config.base_url is not None:
            os.environ["WANDB_BASE_URL"] = config.base_url
        facts.own_folder.mkdir(exist_ok=True)
        offline = config.mode == "offline"
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            id=facts.run_id,
            name=facts.run_id,
            group=facts.name,
            config=dict(facts.config),
            dir=str(facts.own_folder),
            mode=config.mode,
            resume=None if offline else "allow",
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return f"wandb sync {facts.own_folder}/wandb/offline-run-*" if offline else str(self._run.url or "")

    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        # A column has one type, and an answer may be text in one row and a number in the next.
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({STEP: step, "samples": table})

    def finish(self, outcome: str) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
