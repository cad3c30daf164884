"""Begins a run: at its start, from a checkpoint, or with the sessions that an earlier coordinator left.

Invariants: a restart has a higher lineage than every version of the run before it. Gangs, ledger, data set and
checkpoints agree on the progress before the first step is made. Progress that the ledger refuses leaves every
checkpoint unchanged. A damaged checkpoint is reported by name, and the one before it is used.

Sessions survive while there is no coordinator. They are taken over only where their progress equals the ledger's, or is
one update further, namely the update that the ledger would record next; that update is then recorded, not repeated. The
lineage stays, because nothing was undone. In any other case the run restarts from a checkpoint.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.common.v1.finding_pb2 import SEVERITY_WARNING
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.ledger.records import RunRecord
from flotilla_coordinator.runs.checkpoints import Progress
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.trainers.session import LearningSession
from flotilla_core import ids
from flotilla_core.checkpoint import on_disk
from flotilla_core.errors import (
    Cancelled,
    Damaged,
    DeadlineExceeded,
    FlotillaError,
    RankFailed,
    Unavailable,
)
from flotilla_core.findings import info
from flotilla_core.tasks import gather_or_cancel
from flotilla_core.version import Version

FROM_START = "start"
"""The word in place of a checkpoint's name by which a user gives up all steps."""

NEVER_FINISHED = (Unavailable, RankFailed, DeadlineExceeded, Cancelled)
"""Errors of an update whose gang is lost, or hangs, before the update ends."""


@dataclass(frozen=True)
class StartPoint:
    """The point where a run begins; lineage 0 is its start, and any other one continues from a checkpoint."""

    lineage: int = 0
    checkpoint: str = ""
    """The name of a checkpoint, or FROM_START; empty takes the newest one that is good, or the start of the run where
    there is none."""
    by_user: bool = False
    """True where a user resumed the run and may have fixed a reward: samples that the rewards failed on are scored
    again."""
    after_coordinator: bool = False
    """True where the coordinator died: the run continues with sessions that still exist, in the lineage that it had."""


async def restore(run: RunContext, start_point: StartPoint) -> None:
    """Open the sessions and bring the run to its start point."""
    if start_point.after_coordinator:
        with run.phase("look for the sessions"):
            if await reattach(run):
                return
    with run.phase("open session"):
        await run.learners.open()
    if start_point.lineage == 0:
        run.begun = run.owes_evaluation = True
        return
    with run.phase("load checkpoint"):
        shelf = run.checkpoints.shelf
        name, progress = await _loaded(run, start_point.checkpoint)
        await run.ledger.check_fall_back(run.run_id, run.policy.version)
        # This comes before the ledger: after an interruption, no checkpoint may hold updates that the ledger undid.
        await run.disk.until_taken(
            "checkpoints",
            lambda: asyncio.to_thread(on_disk, shelf.path, shelf.fall_back, name, start_point.lineage),
        )
        voided = await run.ledger.fall_back(
            run.run_id,
            run.policy.version,
            step=progress.steps_done,
            cursor=progress.cursor,
            retry_rewards=start_point.by_user,
        )
        if run.rollouts is not None:
            await asyncio.to_thread(run.rollouts.fall_back, progress.steps_done)
        await run.source.restore(progress.steps_done, progress.cursor)
    run.restore(progress)
    run.begun, run.owes_evaluation = True, progress.steps_done == 0
    if name:
        origin = f"Restarting from checkpoint {name}"
    elif start_point.checkpoint == FROM_START:
        origin = "Restarting from the initial weights, as asked for"
    elif not run.checkpoints.wanted:
        origin = "checkpoint.every_steps is 0, so there is no checkpoint: restarting from the initial weights"
    else:
        origin = "No checkpoint yet: restarting from the initial weights"
    again = f"{len(voided)} updates are repeated" if voided else "no update lost"
    run.status.notice(info(f"{origin}, as version {run.policy.version}; {again}"))


async def _loaded(run: RunContext, wanted: str) -> tuple[str, Progress]:
    """Load a checkpoint into the gangs; return its name, empty for the start of the run, and its progress."""
    shelf = run.checkpoints.shelf
    if wanted == FROM_START:
        return "", Progress(run.run_id, 0, run.policy.version, None)
    candidates = [wanted] if wanted else shelf.names()[::-1]
    refused: Damaged | None = None
    for name in candidates:
        try:
            content = await _load(run, shelf.folder(name))
        except Damaged as error:
            if wanted:
                raise
            refused = error
            run.status.notice(error.finding(f"checkpoint {name} is not used", SEVERITY_WARNING))
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


async def _load(run: RunContext, folder: Path) -> bytes:
    """Load what counts of a checkpoint into the gangs."""
    fresh_optimizer = fresh_objective = False
    with suppress(FlotillaError):  # the gang says what is wrong with a checkpoint that cannot be read
        progress = await asyncio.to_thread(Progress.of, folder)
        fresh_optimizer, fresh_objective = progress.fresh_optimizer, progress.fresh_objective
    return await run.learners.load(folder, fresh_optimizer=fresh_optimizer, fresh_objective=fresh_objective)


async def reattach(run: RunContext) -> bool:
    """Return whether the run continues with the sessions that it had."""
    record = await run.ledger.get_run(run.run_id)
    left = await gather_or_cancel(session.left() for session in run.learners.sessions)
    if None in left:
        return False
    learning = run.learners.learning
    try:
        ahead = await gather_or_cancel(
            _is_ahead(session, found, record)
            for session, found in zip(learning, left, strict=False)
            if found is not None
        )
    except NEVER_FINISHED:
        return False
    if not _agree(run, record, ahead):
        return False
    for session, found in zip(run.learners.sessions, left, strict=True):
        assert found is not None, "looked at above"
        session.attach(found)
    run.policy.version = record.version
    await _continue_from(run, record)
    run.update_unrecorded = any(ahead)
    return True


async def _is_ahead(session: LearningSession, found: pb.GetSessionResponse, record: RunRecord) -> bool | None:
    """Return whether the session made the ledger's next update; None where its progress is neither."""
    version, lineage = Version.from_proto(found.policy_version), record.version.lineage
    last, following = (
        ids.update_id(record.run_id, Version(lineage, steps)) for steps in (record.step, record.step + 1)
    )
    if version.lineage != lineage or found.last_update_id not in ("", last, following):
        return None
    result = None
    if found.last_update_id == following:
        result = await session.finished_update(following)
    return result is not None and not result.skipped


def _agree(run: RunContext, record: RunRecord, ahead: list[bool | None]) -> bool:
    """Return whether all gangs have the same progress, and one that fits the ledger."""
    if None in ahead:
        return False
    alike = ahead if run.learners.policy_learns(record.step) else ahead[1:]
    return len(set(alike)) == 1


async def _continue_from(run: RunContext, record: RunRecord) -> None:
    """Continue with the progress of the earlier coordinator, and note what it left undone."""
    directory, steps_done = run.directory, record.step
    evaluations = await asyncio.to_thread(lambda: list(directory.read_evaluations()))
    accuracy = float(evaluations[-1]["accuracy"]) if evaluations else None
    await run.source.restore(steps_done, record.cursor)
    run.restore(Progress(run.run_id, steps_done, record.version, record.cursor, accuracy))
    saved = run.checkpoints.shelf.names()
    run.checkpoints.newest = run.checkpoints.shelf.step_of(saved[-1]) if saved else -1
    # One that was under way on a pinned generator is lost with its coordinator; this version takes its place.
    first = max((int(evaluation["step"]) for evaluation in evaluations), default=-1) + 1
    missing = range(first, steps_done + 1)
    run.owes_evaluation = any(step == steps_done == 0 or run.evaluation_due(step) for step in missing)
    run.begun = True
    what = f"the run continues after step {steps_done} with the sessions that it had, as version {record.version}"
    run.status.notice(info(what))
