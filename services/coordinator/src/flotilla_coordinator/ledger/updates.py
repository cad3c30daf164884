"""The effects of an update on its samples: trained, covered by a checkpoint, or undone by a fall-back to one.

Invariants: those of every transition. An update is applied once under its name, with the same samples. It becomes
durable when every kept checkpoint covers it, and is never undone from then on, so no fall-back ever needs its samples
again. After a fall-back, each sample of the later steps is scored with its payload, issued again, or dropped for a
reason of its own. A failure of its reward is such a reason unless a user resumes. Samples trained before the
checkpoint are unchanged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from flotilla_coordinator.ledger import rows
from flotilla_coordinator.ledger.records import (
    REOPENED,
    REWARDS_FAILED,
    DropReason,
    RunState,
    SampleState,
    VoidedUpdate,
)
from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_core.version import Version

State = SampleState


def consumed(
    db: sqlite3.Connection, run_id: str, update_id: str, sample_ids: Sequence[str], version: Version
) -> bool:
    """Record the samples of an update in the order of their training; return False for a repetition."""
    run = rows.run_key(db, run_id)
    samples = rows.all_known(db, sample_ids)
    if _repeats_update(db, run, update_id, sample_ids):
        rows.count_ignored(db, run, duplicates=len(sample_ids))
        return False
    rows.require(samples, (State.SCORED,), State.CONSUMED, update_id)
    update_key = db.execute(
        "INSERT INTO updates (update_id, run, lineage, step, status) VALUES (?, ?, ?, ?, 'applied')",
        (update_id, run, version.lineage, version.step),
    ).lastrowid
    rows.for_all(
        db,
        f"UPDATE samples SET state = {State.CONSUMED:d}, update_key = new.column2, "
        "update_position = new.column3 FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(sample.key, update_key, position) for position, sample in enumerate(samples)],
    )
    rows.log(
        db,
        [
            rows.Event(run, s.sample_id, s.attempt, s.state, State.CONSUMED, version, detail=update_id)
            for s in samples
        ],
    )
    rows.tally_moves(db, samples, State.CONSUMED)
    return True


def applied_before(db: sqlite3.Connection, run_id: str, version: Version) -> list[str]:
    """Return the updates that led to `version` and are not durable yet, in order."""
    found = db.execute(
        "SELECT update_id FROM updates WHERE run = ? AND step < ? AND status = 'applied' ORDER BY key",
        (rows.run_key(db, run_id), version.step),
    )
    return [update_id for (update_id,) in found.fetchall()]


def durable(db: sqlite3.Connection, run_id: str, update_id: str) -> None:
    """Mark an update that a checkpoint covers; its samples can never be trained again."""
    run = rows.run_key(db, run_id)
    row = db.execute("SELECT key, status FROM updates WHERE update_id = ?", (update_id,)).fetchone()
    if row is None:
        raise NotFound(f"the ledger has no update {update_id}", where=run_id)
    key, status = row
    if status == "durable":
        return
    if status == "void":
        raise FailedPrecondition(f"update {update_id} is void and cannot become durable", where=run_id)
    samples = rows.of_update(db, key)
    rows.require(samples, (State.CONSUMED,), State.DURABLE, update_id)
    db.execute("UPDATE updates SET status = 'durable' WHERE key = ?", (key,))
    db.execute("UPDATE samples SET state = ? WHERE update_key = ?", (State.DURABLE, key))
    rows.log(
        db,
        [rows.Event(run, s.sample_id, s.attempt, s.state, State.DURABLE, detail=update_id) for s in samples],
    )
    rows.tally_moves(db, samples, State.DURABLE)


def refuse_to_void_durable(db: sqlite3.Connection, run_id: str, after_version: Version) -> None:
    """Raise where an update that started from `after_version` or later can no longer be undone."""
    row = db.execute(
        "SELECT update_id FROM updates WHERE run = ? AND step >= ? AND status = 'durable' ORDER BY key LIMIT 1",
        (rows.run_key(db, run_id), after_version.step),
    ).fetchone()
    if row is not None:
        raise FailedPrecondition(
            f"update {row[0]} is durable and cannot be undone",
            where=run_id,
            why=f"a checkpoint after version {after_version} covers it",
            next_step="load that checkpoint",
        )


def void_updates(db: sqlite3.Connection, run_id: str, after_version: Version) -> list[VoidedUpdate]:
    """Undo the updates that started from `after_version` or later, because the trainer fell back to it."""
    refuse_to_void_durable(db, run_id, after_version)
    run = rows.run_key(db, run_id)
    found = db.execute(
        "SELECT key, update_id, lineage, step FROM updates "
        "WHERE run = ? AND step >= ? AND status != 'void' ORDER BY key",
        (run, after_version.step),
    ).fetchall()
    voided = []
    for key, update_id, lineage, step in found:
        samples = rows.of_update(db, key)
        db.execute("UPDATE updates SET status = 'void' WHERE key = ?", (key,))
        db.execute(
            "UPDATE samples SET state = ?, update_key = NULL, update_position = NULL WHERE update_key = ?",
            (State.SCORED, key),
        )
        rows.log(
            db,
            [
                rows.Event(run, s.sample_id, s.attempt, s.state, State.SCORED, detail=update_id)
                for s in samples
            ],
        )
        rows.tally_moves(db, samples, State.SCORED)
        order = tuple(sample.sample_id for sample in samples)
        voided.append(VoidedUpdate(update_id, Version(lineage, step), order))
    return voided


def steps_to_prune(db: sqlite3.Connection, run_id: str, before_step: int) -> list[int]:
    """Return earlier steps with tokens of samples that can never be trained again."""
    found = db.execute(
        "SELECT DISTINCT s.step FROM payloads p JOIN samples s ON s.key = p.sample "
        "WHERE s.run = ? AND s.step < ? AND s.state IN (?, ?)",
        (rows.run_key(db, run_id), before_step, State.DURABLE, State.DROPPED),
    )
    return [step for (step,) in found.fetchall()]


def prune_payloads(db: sqlite3.Connection, run_id: str, step: int) -> int:
    """Delete the tokens of samples of a step that can never be trained again; return the number of samples."""
    return db.execute(
        "DELETE FROM payloads WHERE sample IN "
        "(SELECT key FROM samples WHERE run = ? AND step = ? AND state IN (?, ?))",
        (rows.run_key(db, run_id), step, State.DURABLE, State.DROPPED),
    ).rowcount


def _repeats_update(db: sqlite3.Connection, run: int, update_id: str, sample_ids: Sequence[str]) -> bool:
    """Return whether this same update is recorded already; another one under its name is an error."""
    row = db.execute("SELECT key, run, status FROM updates WHERE update_id = ?", (update_id,)).fetchone()
    if row is None:
        return False
    key, owner, status = row
    if owner != run or status == "void":
        raise FailedPrecondition(f"update {update_id} is {status} and cannot be applied again")
    if {sample.sample_id for sample in rows.of_update(db, key)} != set(sample_ids):
        raise FailedPrecondition(f"update {update_id} has been applied with other samples")
    return True


def fall_back(
    db: sqlite3.Connection,
    run_id: str,
    version: Version,
    step: int,
    cursor: str | None,
    *,
    retry_rewards: bool = False,
) -> list[VoidedUpdate]:
    """Continue the run as `version`, a new lineage, after `step` steps; return the updates that this undid."""
    voided = void_updates(db, run_id, version)
    _ask_again_for_forgotten(db, rows.run_key(db, run_id))
    _reopen(db, rows.run_key(db, run_id), step, (*REOPENED, *REWARDS_FAILED) if retry_rewards else REOPENED)
    # A request of the user in the meantime is kept.
    db.execute(
        "UPDATE runs SET state = iif(state IN (?, ?), state, ?), reason = '', ended_at = NULL, step = ?, "
        "version_lineage = ?, version_step = ?, cursor = ?, last_metrics = '{}' WHERE run_id = ?",
        (
            *(RunState.PAUSED, RunState.STOPPING, RunState.RUNNING),
            *(step, version.lineage, version.step, cursor, run_id),
        ),
    )
    return voided


def _ask_again_for_forgotten(db: sqlite3.Connection, run: int) -> None:
    """Issue again the samples whose tokens retention deleted before a user resumed the run after all."""
    without = "WHERE s.run = ? AND s.state IN (?, ?) AND NOT EXISTS (SELECT 1 FROM payloads p WHERE p.sample = s.key)"
    known = rows.lookup(db, rows.admitted_ids(db, without, (run, State.GENERATED, State.SCORED)))
    _return_to(db, run, list(known.values()), State.ISSUED)


def _reopen(db: sqlite3.Connection, run: int, step: int, reasons: tuple[DropReason, ...]) -> None:
    """Take back drops for reasons that are no longer valid."""
    places = ", ".join("?" * len(reasons))
    found = db.execute(
        "SELECT s.sample_id, p.sample IS NOT NULL AND s.reward IS NOT NULL AND s.drop_reason != ? FROM samples s "
        "LEFT JOIN payloads p ON p.sample = s.key "
        f"WHERE s.run = ? AND s.step >= ? AND s.state = ? AND s.drop_reason IN ({places}) ORDER BY s.key",
        (DropReason.STALE, run, step, State.DROPPED, *reasons),
    ).fetchall()
    known = rows.lookup(db, [sample_id for sample_id, _ in found])
    _return_to(db, run, [known[sample_id] for sample_id, whole in found if whole], State.SCORED)
    again = [known[sample_id] for sample_id, whole in found if not whole]
    rows.for_all(db, "DELETE FROM payloads WHERE sample IN (VALUES {rows})", rows.keys(again))
    _return_to(db, run, again, State.ISSUED)


def _return_to(db: sqlite3.Connection, run: int, samples: list[rows.Known], state: State) -> None:
    forgotten = ", reward = NULL, verdicts = ''" if state is State.ISSUED else ""
    rows.for_all(
        db,
        f"UPDATE samples SET state = {state:d}, drop_reason = ''{forgotten} WHERE key IN (VALUES {{rows}})",
        rows.keys(samples),
    )
    rows.log(
        db, [rows.Event(run, s.sample_id, s.attempt, s.state, state, detail="run_goes_on") for s in samples]
    )
    rows.tally_moves(db, samples, state)
