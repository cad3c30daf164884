"""When a run began, and began anew; as operations on a connection.

Invariants: fences only grow, over all runs of a ledger; a run that is to be stopped stays so until it has ended.
"""

from __future__ import annotations

import sqlite3
import time

from flotilla_coordinator.ledger.records import RunState
from flotilla_coordinator.ledger.rows import run_key
from flotilla_core.rpc import Fence


def begin(db: sqlite3.Connection, run_id: str, lineage: int, *, after_coordinator: bool) -> Fence:
    """Note a beginning; its fence."""
    cursor = db.execute(
        "INSERT INTO beginnings (run, lineage, steps_done, after_coordinator, time) "
        "SELECT key, ?, step, ?, ? FROM runs WHERE key = ?",
        (lineage, after_coordinator, time.time(), run_key(db, run_id)),
    )
    assert cursor.lastrowid is not None, "a row was inserted"
    ledger, epoch = db.execute("SELECT identity.name, owner.epoch FROM identity, owner").fetchone()
    return Fence(ledger, epoch, run_id, cursor.lastrowid)


def coordinators_lost_in_row(db: sqlite3.Connection, run_id: str) -> int:
    """The newest beginnings, as long as each came after a dead coordinator and found no step more than the next."""
    lost = 0
    (steps_done,) = db.execute("SELECT step FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    for after_coordinator, found in db.execute(
        "SELECT b.after_coordinator, b.steps_done FROM beginnings b JOIN runs r ON r.key = b.run "
        "WHERE r.run_id = ? ORDER BY b.fence DESC",
        (run_id,),
    ):
        if not after_coordinator or found != steps_done:
            break
        lost += 1
    return lost


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
