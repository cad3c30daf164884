"""Keep the progress of a session: version, learning rate, updates skipped in a row, and gradients that wait.

Invariants: the version grows by one with every update that was made and with nothing else; a skipped update does not
change it, and too many skipped in a row end the session; an update in which no sample counts is not one of them. The
learning rate is a function of the update's number alone, so a repeated or skipped update does not affect the others.
Gradients that were summed on the ranks and wait for their step are for one version and share one kind of denominator;
a call counts once however often it is sent; when gradients are dropped, the answers to their calls are dropped too.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import OptimizerConfig
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidRequest, NotFinite, StaleVersion
from flotilla_core.logger import get_logger
from flotilla_core.version import Version
from flotilla_trainer.front.idempotent_calls import IdempotentCalls
from flotilla_trainer.objective.base import WHOLE_UPDATES
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

    def continue_from(self, facts: dict[str, Any], *, fresh_objective: bool = False) -> None:
        """Continue this session's lineage at the step of the checkpoint with these facts.

        With `fresh_objective` the facts are of another objective, and what it adapted does not count.
        """
        _, step = facts["policy_version"]
        self.version = Version(self.version.lineage, step)
        if not fresh_objective:
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


KEPT_REPLIES = 4096
NOT_MEANS = ("advantages/std", "explained_variance")
"""The facts of a batch that are no means over its parts."""

Respond = Callable[[], Awaitable[pb.ForwardBackwardResponse]]


class PendingGradients:
    """The ForwardBackward calls since the last step."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._replies: IdempotentCalls[pb.ForwardBackwardResponse] = IdempotentCalls(KEPT_REPLIES)
        self._kind = ""
        self._share = 0.0
        self._sums: dict[str, float] = {}
        self.calls = 0
        self.sample_ids: list[str] = []
        self.units = 0.0
        """The number that the sum of the gradients is divided by."""

    async def once(self, request_id: str, call: Respond) -> pb.ForwardBackwardResponse:
        """Run `call` once for this request and return its answer; a repeat gets the same answer."""
        return await self._replies.run(request_id, call)

    def refuse(self, what: str) -> None:
        """Refuse an action that is impossible while gradients wait."""
        if self.calls:
            raise FailedPrecondition(
                f"{what} cannot be done now",
                where=f"run {self._run_id}",
                why=f"the gradients of {self.calls} ForwardBackward calls wait for their step",
                next_step="call OptimStep first",
            )

    def require(self) -> None:
        """Refuse a step without gradients."""
        if not self.calls:
            raise FailedPrecondition(
                "there are no gradients to step on",
                where=f"run {self._run_id}",
                why="no ForwardBackward call succeeded since the last step, or one that failed dropped them",
                next_step="call ForwardBackward first",
            )

    def check_kind(self, kind: str) -> None:
        """Refuse to add gradients with another kind of denominator."""
        if self.calls and kind != self._kind:
            raise FailedPrecondition(
                f"a loss that is a mean over {kind} does not add up with means over {self._kind}",
                where=f"run {self._run_id}",
                why="the losses of one step are divided by one number",
                next_step="take the step between the two losses, or set algorithm.aggregation to token_mean",
            )

    def add(
        self, kind: str, units: float, sample_ids: list[str], share: float, facts: dict[str, float]
    ) -> None:
        """Record one more call; its facts are means over `share` tokens or pairs."""
        self._kind = kind
        self.calls += 1
        self.units = max(self.units, units) if kind == WHOLE_UPDATES else self.units + units
        self.sample_ids += sample_ids
        self._share += share
        for name, value in facts.items():
            if name not in NOT_MEANS:
                self._sums[name] = self._sums.get(name, 0.0) + value * share

    def facts(self) -> dict[str, float]:
        """Return the facts of the batches of all calls, as if they were one batch."""
        return {name: value / self._share for name, value in self._sums.items()}

    def clear(self, *, forget: bool) -> None:
        """Record that no gradients are left; `forget` the calls if no step used them, so that they may be repeated."""
        self._kind, self._share, self._sums = "", 0.0, {}
        self.calls, self.sample_ids, self.units = 0, [], 0.0
        if forget:
            self._replies = IdempotentCalls(KEPT_REPLIES)
