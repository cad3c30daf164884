"""Going on from a checkpoint, as operations on the writer's connection.

Invariants: an update becomes durable when every checkpoint that is kept covers it, so no fall-back can ever ask for it
back; after a fall-back each sample of the steps to come is scored with its payload, asked for again, or dropped for a
reason of its own, a failure of its reward among them unless a user resumes; nothing that was trained before the
checkpoint moves.
"""

from __future__ import annotations

import sqlite3

from flotilla_coordinator.ledger.records import RunState, SampleState, VoidedUpdate
from flotilla_coordinator.ledger.rows import (
    Event,
    Known,
    admitted_ids,
    for_all,
    keys,
    log,
    lookup,
    run_key,
    tally_moves,
)
from flotilla_coordinator.ledger.updates import void_updates
from flotilla_core.version import Version

RUN_ENDED = "run_ended"
RUN_INTERRUPTED = "run_interrupted"
UPDATE_SKIPPED = "update_skipped"
CRITIC_ONLY = "critic_only"
STALE = "stale"
"""Older than its bound when its update came; whoever makes the step again asks for it again."""
REOPENED = (RUN_ENDED, RUN_INTERRUPTED, UPDATE_SKIPPED, CRITIC_ONLY, STALE)
"""Reasons that say something about the run and nothing about the sample: one that goes on may train it after all."""

UNIFORM = "uniform"
"""All rewards of the group were equal; it stays out, however often its step is made again."""
TAIL = "tail"
"""Its batch was full before it ended, and it would be too old for the next one."""

REWARD_ERROR = "reward_error"
REWARD_TIMEOUT = "reward_timeout"
GROUP_TOO_SMALL = "group_too_small"
REWARDS_FAILED = (REWARD_ERROR, REWARD_TIMEOUT, GROUP_TOO_SMALL)
"""Reasons that a failing reward makes, the last for the siblings of what it failed on."""

State = SampleState


def fall_back(
    db: sqlite3.Connection,
    run_id: str,
    version: Version,
    step: int,
    cursor: str | None,
    *,
    retry_rewards: bool = False,
) -> list[VoidedUpdate]:
    """The run goes on as `version`, a new lineage, after `step` steps; the updates that this undid."""
    voided = void_updates(db, run_id, version)
    _ask_again_for_forgotten(db, run_key(db, run_id))
    _reopen(db, run_key(db, run_id), step, (*REOPENED, *REWARDS_FAILED) if retry_rewards else REOPENED)
    # What a user asked of the run in the meantime holds on.
    db.execute(
        "UPDATE runs SET state = iif(state IN (?, ?), state, ?), reason = '', ended_at = NULL, step = ?, "
        "version_lineage = ?, version_step = ?, cursor = ? WHERE run_id = ?",
        (
            *(RunState.PAUSED, RunState.STOPPING, RunState.RUNNING),
            *(step, version.lineage, version.step, cursor, run_id),
        ),
    )
    return voided


def _ask_again_for_forgotten(db: sqlite3.Connection, run: int) -> None:
    """Samples whose tokens retention took, before a user resumed the run after all."""
    without = "WHERE s.run = ? AND s.state IN (?, ?) AND NOT EXISTS (SELECT 1 FROM payloads p WHERE p.sample = s.key)"
    known = lookup(db, admitted_ids(db, without, (run, State.GENERATED, State.SCORED)))
    _return_to(db, run, list(known.values()), State.ISSUED)


def _reopen(db: sqlite3.Connection, run: int, step: int, reasons: tuple[str, ...]) -> None:
    """Take back drops for reasons that hold no more."""
    places = ", ".join("?" * len(reasons))
    rows = db.execute(
        "SELECT s.sample_id, p.sample IS NOT NULL AND s.reward IS NOT NULL AND s.drop_reason != ? FROM samples s "
        "LEFT JOIN payloads p ON p.sample = s.key "
        f"WHERE s.run = ? AND s.step >= ? AND s.state = ? AND s.drop_reason IN ({places}) ORDER BY s.key",
        (STALE, run, step, State.DROPPED, *reasons),
    ).fetchall()
    known = lookup(db, [sample_id for sample_id, _ in rows])
    _return_to(db, run, [known[sample_id] for sample_id, whole in rows if whole], State.SCORED)
    again = [known[sample_id] for sample_id, whole in rows if not whole]
    for_all(db, "DELETE FROM payloads WHERE sample IN (VALUES {rows})", keys(again))
    _return_to(db, run, again, State.ISSUED)


def _return_to(db: sqlite3.Connection, run: int, samples: list[Known], state: State) -> None:
    forgotten = ", reward = NULL" if state is State.ISSUED else ""
    for_all(
        db,
        f"UPDATE samples SET state = {state:d}, drop_reason = ''{forgotten} WHERE key IN (VALUES {{rows}})",
        keys(samples),
    )
    log(db, [Event(run, s.sample_id, s.attempt, s.state, state, detail="run_goes_on") for s in samples])
    tally_moves(db, samples, state)
