"""Reads the runs of the ledger, on a connection that cannot write."""

from __future__ import annotations

import json
import sqlite3

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_core.errors import InvalidRequest, NotFound
from flotilla_core.version import Version

_RUN_COLUMNS = (
    "run_id, name, state, config_yaml, directory, created_at, ended_at, reason, step, version_lineage, "
    "version_step, cursor"
)


def run(db: sqlite3.Connection, reference: str) -> RunRecord:
    """Return a run by its id, a unique prefix of it, or `latest`."""
    if reference == "latest":
        row = db.execute(f"SELECT {_RUN_COLUMNS} FROM runs ORDER BY key DESC LIMIT 1").fetchone()
        if row is None:
            raise NotFound("there is no run yet", next_step="start one with `flotilla run start`")
        return _run_record(row)
    rows = db.execute(
        f"SELECT {_RUN_COLUMNS} FROM runs WHERE substr(run_id, 1, ?) = ? "
        "ORDER BY run_id = ? DESC, key LIMIT 5",
        (len(reference), reference, reference),
    ).fetchall()
    if not reference or not rows:
        raise NotFound(f"there is no run {reference!r}", next_step="see `flotilla run list`")
    if len(rows) > 1 and rows[0][0] != reference:
        names = ", ".join(row[0] for row in rows)
        raise InvalidRequest(
            f"{reference!r} may mean several runs", why=names, next_step="give more of the id"
        )
    return _run_record(rows[0])


def last_metrics(db: sqlite3.Connection, run_id: str) -> dict[str, float]:
    """Return the metrics of the last step, as they were known when it was recorded."""
    (text,) = db.execute("SELECT last_metrics FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    return dict(json.loads(text))


def runs(db: sqlite3.Connection, limit: int) -> list[RunRecord]:
    """Return runs, newest first."""
    rows = db.execute(f"SELECT {_RUN_COLUMNS} FROM runs ORDER BY key DESC LIMIT ?", (limit,))
    return [_run_record(row) for row in rows]


def unfinished(db: sqlite3.Connection) -> list[RunRecord]:
    """Return all runs that have not ended, the oldest first."""
    ended = [state for state in RunState if state.ended]
    marks = ", ".join("?" * len(ended))
    rows = db.execute(f"SELECT {_RUN_COLUMNS} FROM runs WHERE state NOT IN ({marks}) ORDER BY key", ended)
    return [_run_record(row) for row in rows]


def run_ids(db: sqlite3.Connection) -> list[str]:
    """Return the ids of all runs, newest first."""
    return [str(run_id) for (run_id,) in db.execute("SELECT run_id FROM runs ORDER BY key DESC")]


def _run_record(row: tuple[object, ...]) -> RunRecord:
    run_id, name, state, config, directory, created, ended, reason, step, lineage, version_step, cursor = row
    return RunRecord(
        run_id=str(run_id),
        name=str(name),
        state=RunState(int(str(state))),
        config_yaml=str(config),
        directory=str(directory),
        created_at=float(str(created)),
        ended_at=None if ended is None else float(str(ended)),
        reason=_reason(str(reason)),
        step=int(str(step)),
        version=Version(int(str(lineage)), int(str(version_step))),
        cursor=None if cursor is None else json.loads(str(cursor)),
    )


def _reason(text: str) -> Finding:
    # A file that is read before this version has migrated it has plain text.
    try:
        return Finding(**json.loads(text))
    except (ValueError, TypeError):
        return Finding(what=text)
