"""How a run begins: at its start, or where a checkpoint left it.

Invariants: a later beginning has a higher lineage than every version of the run before it; gangs, ledger, data set and
checkpoints agree on the place before the first step is made; a place that the ledger refuses leaves every
checkpoint as it was; a damaged checkpoint is named and the one before it is used.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.runs.attachment import attach
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.progress import Progress
from flotilla_core.checkpoint import on_disk
from flotilla_core.errors import Damaged


@dataclass(frozen=True)
class Beginning:
    """Lineage 0 is the first; every other one goes on from a checkpoint."""

    lineage: int = 0
    checkpoint: str = ""
    """The name of one; empty takes the newest that is good, or the start of the run where it has none."""
    by_user: bool = False
    """Somebody resumed it, who may have mended a reward: what the rewards failed on is asked for again."""
    after_coordinator: bool = False
    """The coordinator died: where its sessions still live the run goes on with them, in the lineage that it had."""


async def begin(run: RunContext, beginning: Beginning) -> None:
    """Open the session; a later beginning then goes back to a checkpoint."""
    if beginning.after_coordinator:
        with run.phase("look for the sessions"):
            if await attach(run):
                return
    with run.phase("open session"):
        await run.learners.open()
    if beginning.lineage == 0:
        run.begun = run.owes_evaluation = True
        return
    with run.phase("load checkpoint"):
        shelf = run.checkpoints.shelf
        name, progress = await _loaded(run, beginning.checkpoint)
        await run.ledger.check_fall_back(run.run_id, run.policy.version)
        # Before the ledger: were the run cut off in between, no checkpoint may hold updates that the ledger undid.
        await run.disk.until_taken(
            "checkpoints",
            lambda: asyncio.to_thread(on_disk, shelf.path, shelf.fall_back, name, beginning.lineage),
        )
        voided = await run.ledger.fall_back(
            run.run_id,
            run.policy.version,
            step=progress.steps_done,
            cursor=progress.cursor,
            retry_rewards=beginning.by_user,
        )
        await run.source.go_on(progress.steps_done, progress.cursor)
    run.go_on(progress)
    run.begun, run.owes_evaluation = True, progress.steps_done == 0
    origin = f"checkpoint {name}" if name else "its start, for there is no checkpoint yet"
    run.status.notice(
        run_pb2.NOTICE_LEVEL_INFO,
        f"the run goes on from {origin} as version {run.policy.version}; {len(voided)} updates are made again",
    )


async def _loaded(run: RunContext, wanted: str) -> tuple[str, Progress]:
    """The name of the checkpoint that the gangs hold now, empty for the start of the run, and where that was."""
    shelf = run.checkpoints.shelf
    candidates = [wanted] if wanted else shelf.names()[::-1]
    refused: Damaged | None = None
    for name in candidates:
        try:
            content = await run.learners.load(shelf.folder(name))
        except Damaged as error:
            if wanted:
                raise
            refused = error
            run.status.notice(run_pb2.NOTICE_LEVEL_WARNING, f"checkpoint {name} is not used: {error}")
            continue
        return name, Progress.from_bytes(content, name)
    if refused is not None:
        raise Damaged(
            "no checkpoint of the run is good",
            where=str(shelf.path),
            why=f"all of {', '.join(candidates)} are damaged, at last: {refused.where}: {refused.why}",
            next_step="start a new run",
        )
    return "", Progress(run.run_id, 0, run.policy.version, None)
