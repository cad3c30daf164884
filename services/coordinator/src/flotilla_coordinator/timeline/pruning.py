"""What the span store forgets: old runs, and of the last one its oldest spans.

Invariants: the newest spans stay, whatever the limits; the caller holds the transaction.
"""

from __future__ import annotations

import sqlite3

# Free pages are given back to the file system in portions, so that no commit takes long.
_VACUUM_PAGES = 4096
_PORTION = 8
"""Of the last run an eighth of its time goes at once."""


def prune(connection: sqlite3.Connection, keep_runs: int, most_bytes: int | None) -> int:
    """Keep the newest runs alone, and of those no more than fits; how many spans were deleted."""
    deleted = _keep(connection, keep_runs)
    if most_bytes is not None:
        (runs,) = connection.execute("SELECT count(*) FROM runs").fetchone()
        while runs > 1 and _used_bytes(connection) > most_bytes:
            runs -= 1
            deleted += _keep(connection, runs)
        while _used_bytes(connection) > most_bytes and (oldest := _cut_oldest(connection)):
            deleted += oldest
    if deleted:
        connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
    return deleted


def _keep(connection: sqlite3.Connection, keep_runs: int) -> int:
    """Delete runs beyond the newest, and spans of no run that are older than what is kept."""
    kept = connection.execute(
        "SELECT run_id, started_ns FROM runs ORDER BY started_ns DESC, run_id DESC LIMIT ?", (keep_runs,)
    ).fetchall()
    gone = connection.execute("SELECT count(*) FROM runs").fetchone()[0] - len(kept)
    if gone == 0:
        return 0
    oldest_ns = min((started_ns for _, started_ns in kept), default=1 << 62)
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS kept_runs (run_id TEXT PRIMARY KEY)")
    connection.execute("DELETE FROM kept_runs")
    connection.executemany("INSERT INTO kept_runs VALUES (?)", [(run_id,) for run_id, _ in kept])
    connection.execute("DELETE FROM run_traces WHERE run_id NOT IN (SELECT run_id FROM kept_runs)")
    connection.execute("DELETE FROM runs WHERE run_id NOT IN (SELECT run_id FROM kept_runs)")
    return connection.execute(
        "DELETE FROM spans WHERE start_ns < ? AND trace_id NOT IN (SELECT trace_id FROM run_traces)",
        (oldest_ns,),
    ).rowcount


def _cut_oldest(connection: sqlite3.Connection) -> int:
    """Delete the spans of the first part of the time that is left; 0 where that is a moment alone."""
    first, last = connection.execute("SELECT min(start_ns), max(start_ns) FROM spans").fetchone()
    if first is None or first == last:
        return 0
    until = first + max(1, (last - first) // _PORTION)
    deleted = connection.execute("DELETE FROM spans WHERE start_ns < ?", (until,)).rowcount
    connection.execute("DELETE FROM run_traces WHERE trace_id NOT IN (SELECT trace_id FROM spans)")
    return deleted


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
