"""Keep the progress of a session: its version, its learning rate, and the updates skipped in a row.

Invariants: the version grows by one with every update that was made and with nothing else; a skipped update does not
change it, and too many skipped in a row end the session; an update in which no sample counts is not one of them. The
learning rate is a function of the update's number alone, so a repeated or skipped update does not affect the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import OptimizerConfig
from flotilla_core.errors import FlotillaError, InvalidRequest, NotFinite, StaleVersion
from flotilla_core.logger import get_logger
from flotilla_core.version import Version
from flotilla_trainer.objective.session_objective import session_objective
from flotilla_trainer.wire.settings import SessionSettings

NOTHING_COUNTS = "no sample counts: the objective leaves every group out (uniform rewards, or keep_mean_*)"
"""The reason for a step that is left out without a fault; such updates do not count as skipped in a row."""

logger = get_logger()


class SessionProgress:
    """Counts made and skipped updates."""

    def __init__(self, run_id: str, settings: SessionSettings, lineage: int) -> None:
        self._run_id = run_id
        self._optimizer = settings.optimizer
        self._total_updates = settings.total_updates
        self.objective = session_objective(settings.objective)
        self._skipped_in_row = 0
        self._failure: FlotillaError | None = None
        self.version = Version(lineage, 0)

    def learning_rate(self, wanted: pb.LearningRate | None = None) -> float:
        """Return the rate of the next update, by the schedule; its peak and length may be others than at first."""
        optimizer, total_updates = self._optimizer, self._total_updates
        if wanted is None:
            return learning_rate(optimizer, optimizer.learning_rate, total_updates, self.version.step)
        if not (math.isfinite(wanted.peak) and wanted.peak > 0 and wanted.total_updates > 0):
            raise InvalidRequest(
                f"the learning rate is {wanted.peak}, over {wanted.total_updates} updates",
                where="header.learning_rate",
                next_step="send a finite rate above 0 and a number of updates above 0",
            )
        return learning_rate(optimizer, wanted.peak, wanted.total_updates, self.version.step)

    def check_version(self, version: Version, what: str) -> None:
        """Refuse work for another version than the current one."""
        if version != self.version:
            raise StaleVersion(
                f"{what} is for version {version}",
                where=f"run {self._run_id}",
                why=f"the trainer holds version {self.version}",
                next_step="ask GetUpdate which updates were made",
            )

    def check_usable(self) -> None:
        """Refuse updates after too many skipped ones."""
        if self._failure is not None:
            raise self._failure.again()

    def made(self, metrics: dict[str, float], samples: int) -> None:
        """Count an update that was made, of so many samples."""
        self.version = Version(self.version.lineage, self.version.step + 1)
        self._skipped_in_row = 0
        self.objective.adapt(metrics, samples)

    def skipped(self, update_id: str, why: str, dump: Callable[[], str]) -> None:
        """Count an update that could not be made and `dump` its batch; end the session if there are too many."""
        self._skipped_in_row += 1
        dumped = dump()
        logger.warning(
            "update skipped", update_id=update_id, why=why, in_row=self._skipped_in_row, dump=dumped
        )
        if self._skipped_in_row >= self._optimizer.max_skipped_updates:
            self._failure = NotFinite(
                f"{self._skipped_in_row} updates in a row were skipped",
                where=f"run {self._run_id}, update {update_id}",
                why=why,
                next_step=f"look at the dumped batch ({dumped}); lower optimizer.learning_rate",
            )
            raise self._failure.again()

    def facts(self) -> dict[str, Any]:
        """Return the facts for a checkpoint."""
        return {
            "policy_version": list(self.version),
            "skipped_in_row": self._skipped_in_row,
            **self.objective.state(),
        }

    def continue_from(self, facts: dict[str, Any]) -> None:
        """Continue this session's lineage at the step of the checkpoint with these facts."""
        _, step = facts["policy_version"]
        self.version = Version(self.version.lineage, step)
        self._skipped_in_row = facts["skipped_in_row"]
        self.objective.restore(facts)


def learning_rate(optimizer: OptimizerConfig, peak: float, total_updates: int, update: int) -> float:
    """Return the rate of an update (the first is 0): linear warm-up to `peak`, then the schedule to its final share."""
    warmup = optimizer.warmup_updates
    if update < warmup:
        return peak * (update + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    remaining = 1.0 - progress
    if optimizer.schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (optimizer.final_lr_ratio + (1.0 - optimizer.final_lr_ratio) * remaining)
