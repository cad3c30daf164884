"""Keeps what the coordinator has on disk within the limits of its stack.

Invariants: a run that goes on loses nothing but its oldest spans; a directory is removed only where this stack's runs
lie, and before the ledger forgets the run, so that nothing is left that nobody knows of.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import structlog

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.timeline import SpanStore
from flotilla_core.config.stack import CoordinatorConfig
from flotilla_core.errors import FlotillaError

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 300.0
MIB = 1 << 20


class Retention:
    """Looks at ledger, span store and run directories now and then."""

    def __init__(self, config: CoordinatorConfig, ledger: Ledger, spans: SpanStore, runs: Path) -> None:
        self._config = config
        self._ledger = ledger
        self._spans = spans
        self._runs = runs

    async def keep(self) -> None:
        """For as long as the coordinator lives; what cannot be removed now is tried again."""
        while True:
            try:
                await self.enforce()
            except (FlotillaError, OSError) as error:
                log.warning("the past could not be cut down", error=str(error))
            await asyncio.sleep(LOOK_EVERY_S)

    async def enforce(self) -> None:
        """Bring everything within its limits."""
        retention = self._config.retention
        if retention.runs_kept is not None:
            for run_id, directory in await self._ledger.ended_beyond(retention.runs_kept):
                await self._remove(run_id, Path(directory))
        forgotten = await self._ledger.shrink(retention.ledger_mib * MIB)
        if forgotten:
            log.info("the ledger forgot samples of ended runs", runs=forgotten)
        await self._spans.prune(self._config.span_retention_runs, retention.spans_mib * MIB)

    async def _remove(self, run_id: str, directory: Path) -> None:
        if directory.parent == self._runs:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        await self._ledger.forget_run(run_id)
        log.info("an ended run was removed", run_id=run_id, runs_kept=self._config.retention.runs_kept)
