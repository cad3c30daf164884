"""After each sync: what it cost becomes metrics, and trainer and generators are compared on the same tokens."""

from __future__ import annotations

from collections.abc import Callable

from flotilla_coordinator.weights.canary import Canary
from flotilla_coordinator.weights.sync_report import SyncReport
from flotilla_core.errors import FlotillaError


class LiveCheck:
    """Of one run; `warn` hears of a difference beyond `warn_at`."""

    def __init__(
        self, canary: Canary, metrics: dict[str, float], warn_at: float, warn: Callable[[str], None]
    ) -> None:
        self._canary = canary
        self._metrics = metrics
        self._warn_at = warn_at
        self._warn = warn

    async def verify(self, report: SyncReport) -> dict[str, FlotillaError]:
        """The members that could not answer, and why."""
        self._note_cost(report)
        outcome = await self._canary.check(report.version, report.members)
        result, metrics = outcome.report, self._metrics
        if result is None:
            return outcome.failures
        metrics["canary/mean"] = result.probs_mean
        metrics["canary/logprob_mean"] = result.logprob_mean
        metrics["canary/max"] = result.logprob_max
        if result.probs_mean > self._warn_at:
            self._warn(
                f"trainer and generator differ: mean probability difference {result.probs_mean:.4f} "
                f"at version {report.version} (weights.canary.warn_at)"
            )
        return outcome.failures

    def _note_cost(self, report: SyncReport) -> None:
        metrics = self._metrics
        if report.caught_up:
            metrics["sync/caught_up"] = metrics.get("sync/caught_up", 0.0) + len(report.members)
            return
        metrics["sync/bytes"] = float(report.bytes)
        metrics["sync/stage_s"] = report.stage_s
        metrics["sync/stall_s"] = report.stall_s
        metrics["sync/members"] = float(len(report.members))
        metrics["sync/epochs"] = float(report.epochs)
