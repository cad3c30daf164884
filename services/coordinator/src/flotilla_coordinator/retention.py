"""Keeps the coordinator's files within the limits of its stack.

Invariants: an active run loses nothing but its oldest spans, and one that can be resumed keeps its starting weights. A
directory is removed only where it is in this stack's folder of runs. It is first renamed to a name that is removed at
any later check, and then the ledger forgets the run, both in one step under the lock that also guards starts. So no
directory is left over, and a run that is being removed cannot be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from functools import lru_cache
from pathlib import Path

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.timeline.store import SpanStore
from flotilla_coordinator.trainers.spec import critic_of
from flotilla_core.config import RunConfig, load_text
from flotilla_core.config.stack import CoordinatorConfig
from flotilla_core.errors import FlotillaError, InvalidConfig
from flotilla_core.logger import get_logger

log = get_logger(__name__)

LOOK_EVERY_S = 300.0
MIB = 1 << 20
EVERY_RUN = -1
REMEMBERED_CONFIGURATIONS = 4096
REMOVED = ".removed-"
"""The prefix of a directory whose run is forgotten; no run id begins with it."""


class Retention:
    """Prunes ledger, span store and run directories at regular intervals."""

    def __init__(
        self,
        config: CoordinatorConfig,
        ledger: Ledger,
        spans: SpanStore,
        runs: Path,
        change_lock: asyncio.Lock,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._spans = spans
        self._runs = runs
        self._change_lock = change_lock

    async def keep(self) -> None:
        """Enforce the limits for as long as the coordinator lives; what cannot be removed now is tried again."""
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
            await self._forget_beyond(retention.runs_kept)
        # This takes minutes where checkpoints are large, so nothing waits for it.
        await asyncio.to_thread(self._remove_forgotten)
        forgotten = await self._ledger.shrink(retention.ledger_mib * MIB)
        if forgotten:
            log.info("the ledger forgot samples of ended runs", runs=forgotten)
        await self._spans.prune(self._config.span_retention_runs, retention.spans_mib * MIB)

    async def _forget_beyond(self, kept: int) -> None:
        for run_id, place in await self._ledger.ended_beyond(kept):
            # This check runs without the lock first, because reading every configuration for the first time takes
            # seconds.
            if await self._needed(run_id, Path(place)):
                continue
            async with self._change_lock:
                # Meanwhile the run may have been resumed, or another run may have begun from its weights.
                ended = dict(await self._ledger.ended_beyond(kept))
                if run_id not in ended or await self._needed(run_id, Path(place)):
                    continue
                try:
                    await self._forget(run_id, Path(place))
                except OSError as error:  # a directory that cannot be moved does not stop the others
                    log.warning("an ended run could not be removed", run_id=run_id, error=str(error))

    async def _needed(self, run_id: str, directory: Path) -> bool:
        """Return whether another run in the ledger begins from a folder in there."""
        others = [run for run in await self._ledger.list_runs(EVERY_RUN) if run.run_id != run_id]

        def look() -> bool:
            inside = directory.resolve()
            return any(
                folder.resolve().is_relative_to(inside) for run in others for folder in _begins_from(run)
            )

        return await asyncio.to_thread(look)

    async def _forget(self, run_id: str, directory: Path) -> None:
        await self._ledger.check_owner()
        if directory.parent == self._runs:
            # It may be gone, where an earlier coordinator died at this place.
            with contextlib.suppress(FileNotFoundError):
                directory.rename(directory.with_name(REMOVED + directory.name))
        await self._ledger.forget_run(run_id)
        log.info("an ended run was removed", run_id=run_id, runs_kept=self._config.retention.runs_kept)

    def _remove_forgotten(self) -> None:
        for directory in self._runs.glob(f"{REMOVED}*"):
            shutil.rmtree(directory, ignore_errors=True)


def _begins_from(run: RunRecord) -> tuple[Path, ...]:
    """Return the folders that the run reads when it is resumed, or that its adapters need."""
    folders, adapters = _given(run.config_yaml)
    return folders if adapters or run.state is not RunState.SUCCEEDED else ()


@lru_cache(maxsize=REMEMBERED_CONFIGURATIONS)
def _given(config_yaml: str) -> tuple[tuple[Path, ...], bool]:
    """Return the folders that a run was given to begin from, and whether it trains adapters."""
    try:
        config = load_text(RunConfig, config_yaml, source="run")
    except InvalidConfig:  # another release wrote it, and this one does not resume it
        return (), False
    critic, lora = critic_of(config), config.lora
    given = (
        config.initial_weights,
        critic.initial_weights if critic else None,
        lora.adapter if lora else None,
    )
    return tuple(folder for folder in given if isinstance(folder, Path)), lora is not None
