"""When a run began, and began anew; as operations on a connection.

Invariants: fences only grow, over all runs of a ledger; a run that is to be stopped stays so until it has ended.
"""

from __future__ import annotations

import sqlite3
import time

from flotilla_coordinator.ledger.records import RunState
from flotilla_coordinator.ledger.rows import run_key
from flotilla_core.rpc import Fence


def begin(db: sqlite3.Connection, run_id: str, lineage: int) -> Fence:
    """Note a beginning; its fence."""
    cursor = db.execute(
        "INSERT INTO beginnings (run, lineage, time) VALUES (?, ?, ?)",
        (run_key(db, run_id), lineage, time.time()),
    )
    assert cursor.lastrowid is not None, "a row was inserted"
    ledger, epoch = db.execute("SELECT identity.name, owner.epoch FROM identity, owner").fetchone()
    return Fence(ledger, epoch, run_id, cursor.lastrowid)


def taken_over(db: sqlite3.Connection, run_id: str) -> None:
    """Count that a coordinator is about to go on with what another one left; the next step takes the count back."""
    db.execute("UPDATE runs SET takeovers = takeovers + 1 WHERE key = ?", (run_key(db, run_id),))


def takeovers(db: sqlite3.Connection, run_id: str) -> int:
    """How often a coordinator went on with what another had left, since a step was made or a user asked for it."""
    (count,) = db.execute("SELECT takeovers FROM runs WHERE key = ?", (run_key(db, run_id),)).fetchone()
    return int(count)


def asked_for(db: sqlite3.Connection, run_id: str) -> None:
    """Forget how often the run was taken over: a user wants it to go on."""
    db.execute("UPDATE runs SET takeovers = 0 WHERE key = ?", (run_key(db, run_id),))


def stopping(db: sqlite3.Connection, run_id: str, reason: str) -> None:
    """Mark a run that goes on; one that has ended meanwhile keeps its end."""
    db.execute(
        "UPDATE runs SET state = ?, reason = ? WHERE key = ? AND state IN (?, ?, ?)",
        (
            RunState.STOPPING,
            reason,
            run_key(db, run_id),
            RunState.PENDING,
            RunState.RUNNING,
            RunState.PAUSED,
        ),
    )
