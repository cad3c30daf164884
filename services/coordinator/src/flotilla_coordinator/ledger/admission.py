"""The admission of samples: before anyone is asked to generate them, their group is on record.

Invariants: as for every step of a sample; admitted once, however often a group is asked for; all groups that callers
bring at once are one operation, refused whole where one of them cannot be admitted or holds a sample of another.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence

import numpy as np

from flotilla_coordinator.ledger.records import GroupIssue, Recorded, SampleState
from flotilla_coordinator.ledger.rows import Event, count_ignored, for_all, log, lookup, run_key, tally
from flotilla_core.errors import InvalidRequest

State = SampleState


def issue(db: sqlite3.Connection, groups: Sequence[GroupIssue]) -> list[Recorded]:
    """Admit the samples of groups that are not known yet."""
    runs = {run_id: run_key(db, run_id) for run_id in {group.run_id for group in groups}}
    known = lookup(db, [sample_id for group in groups for sample_id in group.sample_ids])
    recorded = []
    for group in groups:
        before = [known[sample_id] for sample_id in group.sample_ids if sample_id in known]
        if any(sample.run != runs[group.run_id] for sample in before):
            raise InvalidRequest(f"group {group.group_id} holds samples of another run", where=group.run_id)
        fresh = tuple(sample_id for sample_id in group.sample_ids if sample_id not in known)
        recorded.append(Recorded(fresh, tuple(sample.sample_id for sample in before)))
        count_ignored(db, runs[group.run_id], duplicates=len(before))
    if fresh_of := [(group, of.accepted) for group, of in zip(groups, recorded, strict=True) if of.accepted]:
        _admit(db, runs, fresh_of)
    return recorded


def _admit(
    db: sqlite3.Connection, runs: dict[str, int], fresh: Sequence[tuple[GroupIssue, Sequence[str]]]
) -> None:
    """Samples of groups that nobody asked for before."""
    group_keys = _group_keys(db, [group for group, _ in fresh])
    rows = [(sample_id, runs[group.run_id], group) for group, sample_ids in fresh for sample_id in sample_ids]
    for_all(
        db,
        "INSERT INTO samples (sample_id, run, grp, step, state, attempt) VALUES {rows}",
        [
            (sample_id, run, group_keys[group.group_id], group.step, State.ISSUED, group.attempt)
            for sample_id, run, group in rows
        ],
    )
    log(db, [Event(run, sample_id, group.attempt, None, State.ISSUED) for sample_id, run, group in rows])
    admitted = Counter(run for _, run, _ in rows)
    tally(db, Counter({(run, State.ISSUED, ""): number for run, number in admitted.items()}))
    for run, number in admitted.items():
        db.execute("UPDATE runs SET admitted = admitted + ? WHERE key = ?", (number, run))


def _group_keys(db: sqlite3.Connection, groups: Sequence[GroupIssue]) -> dict[str, int]:
    """The rows of groups, those that are new among them."""
    for_all(
        db,
        "INSERT OR IGNORE INTO groups (group_id, prompt_text, prompt_token_ids, max_staleness) VALUES {rows}",
        [
            (
                group.group_id,
                group.prompt_text,
                np.ascontiguousarray(group.prompt_token_ids, dtype="<i4").data,
                group.max_staleness,
            )
            for group in groups
        ],
    )
    (text,) = db.execute(
        "SELECT json_group_object(group_id, key) FROM groups WHERE group_id IN (SELECT value FROM json_each(?))",
        (json.dumps([group.group_id for group in groups]),),
    ).fetchone()
    found: dict[str, int] = json.loads(text)
    return found
