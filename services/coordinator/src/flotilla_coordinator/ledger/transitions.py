"""What becomes of admitted samples besides their delivery: asked for again, dropped, counted for another step.

Invariants of every step of a sample, wherever it is written: it is checked against the stored state before anything
changes; an illegal one raises an error that names the sample and both states, and changes nothing; each leaves one row
in the append-only `transitions` and moves the tallies with it. Attempts play no part in identity.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from flotilla_coordinator.ledger.records import (
    Recorded,
    SampleState,
)
from flotilla_coordinator.ledger.rows import (
    Event,
    admitted_ids,
    all_known,
    count_ignored,
    for_all,
    keys,
    log,
    require,
    run_key,
    tally_moves,
)
from flotilla_core.errors import FailedPrecondition, InvalidRequest

State = SampleState
IN_FLIGHT = (State.ISSUED, State.GENERATED, State.SCORED)


def reissue(db: sqlite3.Connection, sample_ids: Sequence[str], attempt: int, why: str) -> None:
    """Ask again for samples that did not arrive (or were not scored)."""
    samples = all_known(db, sample_ids)
    require(samples, (State.ISSUED, State.GENERATED), State.ISSUED)
    for sample in samples:
        if attempt <= sample.attempt:
            raise FailedPrecondition(
                f"sample {sample.sample_id} is at attempt {sample.attempt} and cannot go to attempt {attempt}"
            )
    for_all(
        db,
        f"UPDATE samples SET state = {State.ISSUED:d}, attempt = new.column2, generator = '' "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(sample.key, attempt) for sample in samples],
    )
    for_all(db, "DELETE FROM payloads WHERE sample IN (VALUES {rows})", keys(samples))
    log(
        db,
        [Event(s.run, s.sample_id, attempt, s.state, State.ISSUED, detail=why) for s in samples],
    )
    tally_moves(db, samples, State.ISSUED)


def dropped(db: sqlite3.Connection, run_id: str, sample_ids: Sequence[str], reason: str) -> Recorded:
    """Take samples out, for a reason that is counted."""
    if not reason:
        raise InvalidRequest("a sample is dropped without a reason", where=run_id)
    run = run_key(db, run_id)
    samples = all_known(db, sample_ids)
    already = [sample for sample in samples if sample.state is State.DROPPED]
    leaving = [sample for sample in samples if sample.state is not State.DROPPED]
    require(leaving, IN_FLIGHT, State.DROPPED)
    for_all(
        db,
        f"UPDATE samples SET state = {State.DROPPED:d}, drop_reason = new.column2 "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(sample.key, reason) for sample in leaving],
    )
    log(
        db,
        [Event(run, s.sample_id, s.attempt, s.state, State.DROPPED, detail=reason) for s in leaving],
    )
    tally_moves(db, leaving, State.DROPPED, reason)
    count_ignored(db, run, duplicates=len(already))
    return Recorded(
        tuple(sample.sample_id for sample in leaving), tuple(sample.sample_id for sample in already)
    )


def carry_over(db: sqlite3.Connection, run_id: str, group_ids: Sequence[str], step: int) -> None:
    """Let whole groups count for another step; no sample changes its state."""
    run = run_key(db, run_id)
    of_groups = (
        "JOIN groups g ON g.key = s.grp WHERE s.run = ? AND g.group_id IN (SELECT value FROM json_each(?))"
    )
    samples = all_known(db, admitted_ids(db, of_groups, (run, json.dumps(list(group_ids)))))
    trained = [sample for sample in samples if sample.state not in (*IN_FLIGHT, State.DROPPED)]
    if trained:
        raise FailedPrecondition(
            f"sample {trained[0].sample_id} is {trained[0].state.name.lower()} and cannot count for step {step}",
            where=run_id,
            why=f"update {trained[0].update_id} has trained it",
        )
    for_all(
        db,
        "UPDATE samples SET step = new.column2 FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(sample.key, step) for sample in samples],
    )


def drop_in_flight(db: sqlite3.Connection, run_id: str, reason: str) -> int:
    """Drop everything of a run that was neither trained nor dropped; the number of samples."""
    open_ = admitted_ids(db, "WHERE s.run = ? AND s.state IN (?, ?, ?)", (run_key(db, run_id), *IN_FLIGHT))
    return len(dropped(db, run_id, open_, reason).accepted)
