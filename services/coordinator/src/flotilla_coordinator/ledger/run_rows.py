"""The row of a run, as operations on the writer's connection.

Invariants: a run is admitted once under its id; what is not given of a change stays as it was.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from flotilla_coordinator.ledger.records import RunRecord
from flotilla_coordinator.ledger.rows import run_key
from flotilla_core.errors import AlreadyExists
from flotilla_core.version import Version


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
        "reason": run.reason,
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
    db: sqlite3.Connection, run_id: str, step: int, version: Version, cursor: dict[str, Any] | None
) -> None:
    """The run has made so many steps, which led to `version`; `cursor` is its place in the data set."""
    db.execute(
        "UPDATE runs SET step = ?, version_lineage = ?, version_step = ?, cursor = ?, takeovers = 0 WHERE run_id = ?",
        (step, version.lineage, version.step, cursor_text(cursor), run_id),
    )


def cursor_text(cursor: dict[str, Any] | None) -> str | None:
    """As the column holds it."""
    return None if cursor is None else json.dumps(cursor, sort_keys=True)
