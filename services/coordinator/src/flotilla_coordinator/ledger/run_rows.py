"""Writes the row of a run: its admission, its starts, its changes, and its removal after its end.

Invariants: these are operations on the writer's connection. A run is admitted once under its id. A change leaves all
other columns unchanged. Fences only grow, over all runs of a ledger, and none is issued twice. A run that a user stops
keeps that state until it has ended. Nothing of an active run is deleted. The tokens are deleted first, because a
resumed run can generate them again, and then the history, after which the run counts as one without samples.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.ledger.rows import run_key
from flotilla_core.errors import AlreadyExists, FailedPrecondition, NotFound
from flotilla_core.findings import parts_of
from flotilla_core.rpc import Fence
from flotilla_core.version import Version

# Work is done in portions, so that no commit of an active run waits for long.
MOST_AT_ONCE = 10_000
VACUUM_PAGES = 2048

ENDED = tuple(state for state in RunState if state.ended)
_ENDED_LIST = ", ".join(str(int(state)) for state in ENDED)


def insert(db: sqlite3.Connection, run: RunRecord) -> None:
    """Admit a run."""
    if db.execute("SELECT 1 FROM runs WHERE run_id = ?", (run.run_id,)).fetchone():
        raise AlreadyExists(f"the ledger has a run {run.run_id} already")
    values = {
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "config_yaml": run.config_yaml,
        "directory": run.directory,
        "created_at": run.created_at,
        "ended_at": run.ended_at,
        "reason": reason_text(run.reason),
        "step": run.step,
        "version_lineage": run.version.lineage,
        "version_step": run.version.step,
        "cursor": cursor_text(run.cursor),
    }
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO runs ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))


def change(db: sqlite3.Connection, run_id: str, values: Mapping[str, Any]) -> None:
    """Set columns of a run."""
    key = run_key(db, run_id)
    if values:
        assignments = ", ".join(f"{column} = ?" for column in values)
        db.execute(f"UPDATE runs SET {assignments} WHERE key = ?", (*values.values(), key))


def went_on(
    db: sqlite3.Connection,
    run_id: str,
    step: int,
    version: Version,
    cursor: dict[str, Any] | None,
    metrics: Mapping[str, float],
) -> None:
    """Record that the run has made `step` steps, which led to `version`; `cursor` is its place in the data set."""
    db.execute(
        "UPDATE runs SET step = ?, version_lineage = ?, version_step = ?, cursor = ?, last_metrics = ?, takeovers = 0 "
        "WHERE run_id = ?",
        (step, version.lineage, version.step, cursor_text(cursor), json.dumps(metrics), run_id),
    )


def cursor_text(cursor: dict[str, Any] | None) -> str | None:
    """Return the cursor as the column holds it."""
    return None if cursor is None else json.dumps(cursor, sort_keys=True)


def reason_text(reason: Finding) -> str:
    """Return the reason as the column holds it."""
    parts = parts_of(reason)
    return json.dumps(parts) if parts else ""


def begin(db: sqlite3.Connection, run_id: str, lineage: int) -> Fence:
    """Record a new start of the run, and return its fence."""
    cursor = db.execute(
        "INSERT INTO beginnings (run, lineage, time) VALUES (?, ?, ?)",
        (run_key(db, run_id), lineage, time.time()),
    )
    assert cursor.lastrowid is not None, "a row was inserted"
    ledger, epoch = db.execute("SELECT identity.name, owner.epoch FROM identity, owner").fetchone()
    return Fence(ledger, epoch, run_id, cursor.lastrowid)


def taken_over(db: sqlite3.Connection, run_id: str) -> None:
    """Count that a coordinator is about to continue what another one left; the next step resets the count."""
    db.execute("UPDATE runs SET takeovers = takeovers + 1 WHERE key = ?", (run_key(db, run_id),))


def takeovers(db: sqlite3.Connection, run_id: str) -> int:
    """Return how often a coordinator took the run over since a step was made or a user resumed it."""
    (count,) = db.execute("SELECT takeovers FROM runs WHERE key = ?", (run_key(db, run_id),)).fetchone()
    return int(count)


def asked_for(db: sqlite3.Connection, run_id: str) -> None:
    """Reset the count of takeovers, because a user resumes the run."""
    db.execute("UPDATE runs SET takeovers = 0 WHERE key = ?", (run_key(db, run_id),))


def stopping(db: sqlite3.Connection, run_id: str, reason: Finding) -> None:
    """Mark an active run as stopping; one that has ended meanwhile keeps its end."""
    db.execute(
        "UPDATE runs SET state = ?, reason = ? WHERE key = ? AND state IN (?, ?, ?)",
        (
            RunState.STOPPING,
            reason_text(reason),
            run_key(db, run_id),
            RunState.PENDING,
            RunState.RUNNING,
            RunState.PAUSED,
        ),
    )


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the size of the file's content, without free pages."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def next_with_payloads(db: sqlite3.Connection) -> str | None:
    """Return the oldest ended run whose samples have tokens."""
    return _oldest(
        db, "EXISTS (SELECT 1 FROM samples s JOIN payloads p ON p.sample = s.key WHERE s.run = runs.key)"
    )


def next_with_history(db: sqlite3.Connection) -> str | None:
    """Return the oldest ended run with a history of samples."""
    return _oldest(db, "EXISTS (SELECT 1 FROM transitions t WHERE t.run = runs.key)")


def beyond(db: sqlite3.Connection, kept: int) -> list[tuple[str, str]]:
    """Return the ended runs before the newest `kept`, with their directories, the oldest first."""
    rows = db.execute(
        f"SELECT run_id, directory FROM runs WHERE state IN ({_ENDED_LIST}) ORDER BY key DESC LIMIT -1 OFFSET ?",
        (kept,),
    )
    return [(str(run_id), str(directory)) for run_id, directory in rows][::-1]


def forget_payloads(db: sqlite3.Connection, run_id: str, most: int = MOST_AT_ONCE) -> None:
    """Delete the tokens, log-probabilities and texts of the oldest samples of a run that have any."""
    db.execute(
        "DELETE FROM payloads WHERE sample IN (SELECT s.key FROM samples s JOIN payloads p ON p.sample = s.key "
        "WHERE s.run = ? ORDER BY s.key LIMIT ?)",
        (_ended_key(db, run_id), most),
    )
    _give_back(db)


def forget_history(db: sqlite3.Connection, run_id: str) -> None:
    """Delete every sample of a run, with its history."""
    run = _ended_key(db, run_id)
    forget_payloads(db, run_id, most=-1)
    db.execute("INSERT INTO forgetting VALUES (?)", (run,))
    db.execute("DELETE FROM groups WHERE key IN (SELECT grp FROM samples WHERE run = ?)", (run,))
    for table in ("transitions", "samples", "updates", "tallies"):
        db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
    db.execute("DELETE FROM forgetting WHERE run = ?", (run,))
    db.execute("UPDATE runs SET admitted = 0, duplicates = 0, late = 0 WHERE key = ?", (run,))
    _give_back(db)


def forget_run(db: sqlite3.Connection, run_id: str) -> None:
    """Delete every trace of a run."""
    run = _ended_key(db, run_id)
    forget_history(db, run_id)
    db.execute("DELETE FROM beginnings WHERE run = ?", (run,))
    db.execute("DELETE FROM runs WHERE key = ?", (run,))


def _oldest(db: sqlite3.Connection, condition: str) -> str | None:
    row = db.execute(
        f"SELECT run_id FROM runs WHERE state IN ({_ENDED_LIST}) AND {condition} ORDER BY key LIMIT 1"
    ).fetchone()
    return None if row is None else str(row[0])


def _ended_key(db: sqlite3.Connection, run_id: str) -> int:
    row = db.execute("SELECT key, state FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    if row is None:
        raise NotFound(f"the ledger has no run {run_id}")
    key, state = row
    if state not in ENDED:
        raise FailedPrecondition(f"run {run_id} is active: nothing of it can be removed")
    return int(key)


def _give_back(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
