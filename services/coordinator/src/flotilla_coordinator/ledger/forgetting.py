"""What the ledger forgets of runs that have ended, as operations on the writer's connection.

Invariants: nothing of a run that goes on is forgotten; first go the tokens, which a resumed run asks for again, then
the history, after which the run counts as one without samples; fences are never given out twice.
"""

from __future__ import annotations

import sqlite3

from flotilla_coordinator.ledger.records import RunState
from flotilla_core.errors import FailedPrecondition, NotFound

# Portions, so that no commit of a run that goes on waits for long.
MOST_AT_ONCE = 10_000
VACUUM_PAGES = 2048

ENDED = tuple(state for state in RunState if state.ended)
_ENDED_LIST = ", ".join(str(int(state)) for state in ENDED)


def used_bytes(db: sqlite3.Connection) -> int:
    """What the file holds, without the pages that are free again."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def next_with_payloads(db: sqlite3.Connection) -> str | None:
    """The oldest ended run whose samples have tokens."""
    return _oldest(
        db, "EXISTS (SELECT 1 FROM samples s JOIN payloads p ON p.sample = s.key WHERE s.run = runs.key)"
    )


def next_with_history(db: sqlite3.Connection) -> str | None:
    """The oldest ended run whose samples are known."""
    return _oldest(db, "EXISTS (SELECT 1 FROM transitions t WHERE t.run = runs.key)")


def beyond(db: sqlite3.Connection, kept: int) -> list[tuple[str, str]]:
    """Ended runs before the newest `kept`, with their directories, the oldest first."""
    rows = db.execute(
        f"SELECT run_id, directory FROM runs WHERE state IN ({_ENDED_LIST}) ORDER BY key DESC LIMIT -1 OFFSET ?",
        (kept,),
    )
    return [(str(run_id), str(directory)) for run_id, directory in rows][::-1]


def forget_payloads(db: sqlite3.Connection, run_id: str, most: int = MOST_AT_ONCE) -> None:
    """The tokens, log-probabilities and texts of the oldest samples of a run that have any."""
    db.execute(
        "DELETE FROM payloads WHERE sample IN (SELECT s.key FROM samples s JOIN payloads p ON p.sample = s.key "
        "WHERE s.run = ? ORDER BY s.key LIMIT ?)",
        (_ended_key(db, run_id), most),
    )
    _give_back(db)


def forget_history(db: sqlite3.Connection, run_id: str) -> None:
    """Every sample of a run, and all that happened to it."""
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
    """That there ever was such a run."""
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
        raise FailedPrecondition(f"run {run_id} goes on: nothing of it is forgotten")
    return int(key)


def _give_back(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
