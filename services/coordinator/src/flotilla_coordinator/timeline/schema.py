"""The tables of the span store.

Spans are clustered by trace, so that a trace is read in one place and a batch that is sent twice changes nothing.
`run_traces` says which traces belong to a run and which of its steps they carry; it is filled as spans arrive, in any
order.

Invariants: `user_version` says which migrations a file has; a released migration never changes; a file from a newer
Flotilla is refused.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from flotilla_core.errors import FailedPrecondition

NO_STEP = -1

# Files from before schemas had numbers have these tables already.
_FIRST = """
CREATE TABLE IF NOT EXISTS resources (
    id INTEGER PRIMARY KEY,
    service TEXT NOT NULL,
    instance TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    UNIQUE (service, instance, host, pid)
);
CREATE TABLE IF NOT EXISTS spans (
    trace_id BLOB NOT NULL,
    span_id BLOB NOT NULL,
    parent_id BLOB,
    name TEXT NOT NULL,
    kind INTEGER NOT NULL,
    resource INTEGER NOT NULL REFERENCES resources (id),
    start_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    status INTEGER NOT NULL,
    attributes TEXT NOT NULL,
    links BLOB,
    PRIMARY KEY (trace_id, span_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS run_traces (
    run_id TEXT NOT NULL,
    trace_id BLOB NOT NULL,
    step INTEGER NOT NULL,
    PRIMARY KEY (run_id, trace_id, step)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS run_traces_by_trace ON run_traces (trace_id);
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY,
    started_ns INTEGER NOT NULL
) WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (_FIRST,)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a file to the schema of this Flotilla."""
    (done,) = connection.execute("PRAGMA user_version").fetchone()
    if done > len(MIGRATIONS):
        raise FailedPrecondition(
            f"the span store has schema {done}, and this Flotilla supports up to {len(MIGRATIONS)}",
            where=str(path),
            why="a newer Flotilla wrote it",
            next_step="use that version, or move the file away: it holds timelines alone",
        )
    for number, script in enumerate(MIGRATIONS[done:], start=done + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")
