"""Finds rows of samples, checks their state, and writes the event log and the tallies; transitions are built on it.

Invariants: the event log and the tallies change in the same transaction as their samples. A change of many rows is one
statement: SQLite releases the interpreter for each row that it returns or takes by itself, and while the event loop is
busy a thread waits for its next turn after every such release.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_coordinator.ledger.records import SampleState
from flotilla_core.errors import FailedPrecondition, InvalidRequest, NotFound
from flotilla_core.version import Version

State = SampleState


@dataclass(frozen=True)
class Known:
    """The recorded state of a sample before a transition."""

    key: int
    sample_id: str
    run: int
    state: State
    attempt: int
    drop_reason: str
    update_id: str


def run_key(db: sqlite3.Connection, run_id: str) -> int:
    """Return the row of a run."""
    row = db.execute("SELECT key FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    if row is None:
        raise NotFound(f"the ledger has no run {run_id}")
    return int(row[0])


@dataclass(frozen=True)
class Event:
    run: int
    sample_id: str
    attempt: int
    from_state: State | None
    to_state: State
    version: Version | None = None
    detail: str = ""


_KNOWN = (
    "SELECT json_group_array(json_array("
    "s.key, s.sample_id, s.run, s.state, s.attempt, s.drop_reason, coalesce(u.update_id, ''), s.update_position)) "
    "FROM samples s LEFT JOIN updates u ON u.key = s.update_key "
)
MOST_ROWS = 512
"""The most rows of one statement, a power of two: SQLite takes at most 32,766 values."""


def for_all(
    db: sqlite3.Connection, statement: str, rows: Sequence[Sequence[Any]], most_rows: int = MOST_ROWS
) -> None:
    """Execute a statement whose `{rows}` are the rows, each one in brackets.

    The number of rows of a statement is a power of two, so that few statements are prepared. SQLite keeps them, each
    with its last values: where rows are large, `most_rows` should be small.
    """
    first = 0
    while first < len(rows):
        most = min(len(rows) - first, most_rows)
        part = rows[first : first + (1 << most.bit_length() - 1)]
        marks = ", ".join([f"({', '.join('?' * len(part[0]))})"] * len(part))
        db.execute(statement.format(rows=marks), [value for row in part for value in row])
        first += len(part)


def keys(samples: Sequence[Known]) -> list[tuple[int]]:
    """Return the rows' keys as the values of a statement."""
    return [(sample.key,) for sample in samples]


def lookup(db: sqlite3.Connection, sample_ids: Sequence[str]) -> dict[str, Known]:
    where = "WHERE s.sample_id IN (SELECT value FROM json_each(?))"
    rows = _rows(db, where, json.dumps(list(sample_ids)))
    return {known.sample_id: known for known, _ in rows}


def admitted_ids(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[str]:
    """Return the ids of samples `s` that meet a condition, in the order of admission."""
    (text,) = db.execute(
        f"SELECT json_group_array(sample_id) FROM (SELECT s.sample_id FROM samples s {where} ORDER BY s.key)",
        values,
    ).fetchone()
    ids: list[str] = json.loads(text)
    return ids


def _rows(db: sqlite3.Connection, where: str, value: str | int) -> list[tuple[Known, int | None]]:
    """Return samples, each with its place in the update that trained it, if any did."""
    (text,) = db.execute(_KNOWN + where, (value,)).fetchone()
    return [
        (Known(key, sample_id, run, State(state), attempt, drop_reason, update_id), position)
        for key, sample_id, run, state, attempt, drop_reason, update_id, position in json.loads(text)
    ]


def all_known(db: sqlite3.Connection, sample_ids: Sequence[str]) -> list[Known]:
    """Return the samples in the given order; an unknown or repeated one is an error that names it."""
    known = lookup(db, sample_ids)
    for sample_id, times in Counter(sample_ids).items():
        if sample_id not in known:
            raise NotFound(f"the ledger has no sample {sample_id}", why="it was never issued")
        if times > 1:
            raise InvalidRequest(f"sample {sample_id} is named {times} times in one call")
    return [known[sample_id] for sample_id in sample_ids]


def of_update(db: sqlite3.Connection, update_key: int) -> list[Known]:
    rows = _rows(db, "WHERE s.update_key = ?", update_key)
    return [known for known, _ in sorted(rows, key=lambda row: row[1] or 0)]


def require(samples: Sequence[Known], allowed: tuple[State, ...], to: State, update_id: str = "") -> None:
    for sample in samples:
        if sample.state in allowed:
            continue
        held = (
            f" ({sample.drop_reason or sample.update_id})" if sample.drop_reason or sample.update_id else ""
        )
        wanted = f" ({update_id})" if update_id else ""
        raise FailedPrecondition(
            f"sample {sample.sample_id} is {sample.state.name.lower()}{held} "
            f"and cannot become {to.name.lower()}{wanted}",
            where="ledger",
        )


def log(db: sqlite3.Connection, events: Sequence[Event]) -> None:
    now = time.time()
    for_all(
        db,
        "INSERT INTO transitions (run, sample_id, attempt, from_state, to_state, version_lineage, "
        "version_step, detail, time) VALUES {rows}",
        [
            (
                e.run,
                e.sample_id,
                e.attempt,
                e.from_state,
                e.to_state,
                e.version.lineage if e.version else None,
                e.version.step if e.version else None,
                e.detail,
                now,
            )
            for e in events
        ],
    )


def tally_moves(db: sqlite3.Connection, samples: Sequence[Known], to: State, reason: str = "") -> None:
    """Move samples from the tallies of their present states to that of `to`."""
    changes: Counter[tuple[int, State, str]] = Counter()
    for sample in samples:
        changes[sample.run, sample.state, sample.drop_reason] -= 1
        changes[sample.run, to, reason] += 1
    tally(db, changes)


def tally(db: sqlite3.Connection, changes: Counter[tuple[int, State, str]]) -> None:
    """Add the changes to the tallies by run, state and reason."""
    for_all(
        db,
        "INSERT INTO tallies (run, state, reason, samples) VALUES {rows} "
        "ON CONFLICT (run, state, reason) DO UPDATE SET samples = samples + excluded.samples",
        [(*tallied, change) for tallied, change in changes.items() if change],
    )


def count_ignored(db: sqlite3.Connection, run: int, *, duplicates: int, late: int = 0) -> None:
    if duplicates or late:
        db.execute(
            "UPDATE runs SET duplicates = duplicates + ?, late = late + ? WHERE key = ?",
            (duplicates, late, run),
        )
