"""Every step that a sample takes before an update trains it, as operations on the writer's connection.

Invariants: a step is checked against the stored state before anything is written; an illegal one raises an
error that names the sample and both states, and changes nothing; every step leaves one row in the
append-only `transitions` and moves the tallies with it. Attempts play no part in identity: the first
delivery of a sample counts, whichever attempt it came from.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from flotilla_coordinator.ledger.records import (
    GeneratedSample,
    GroupIssue,
    Recorded,
    SampleState,
    ScoredSample,
    TokenSpan,
)
from flotilla_coordinator.ledger.rows import (
    Event,
    Known,
    all_known,
    count_ignored,
    for_all,
    keys,
    log,
    lookup,
    require,
    run_key,
    tally,
    tally_moves,
)
from flotilla_core.errors import FailedPrecondition, InvalidRequest

S = TypeVar("S", bound=GeneratedSample)
State = SampleState
IN_FLIGHT = (State.ISSUED, State.GENERATED, State.SCORED)
_REWARDED = (
    f"state = {State.SCORED:d}, reward = new.column2, reward_terms = new.column3, greedy_reward = new.column4"
)


def issue(db: sqlite3.Connection, group: GroupIssue) -> Recorded:
    """Admit the samples of a group that are not known yet."""
    run = run_key(db, group.run_id)
    known = lookup(db, group.sample_ids)
    strangers = [known[sample_id] for sample_id in group.sample_ids if sample_id in known]
    if any(sample.run != run for sample in strangers):
        raise InvalidRequest(f"group {group.group_id} holds samples of another run", where=group.run_id)
    fresh = [sample_id for sample_id in group.sample_ids if sample_id not in known]
    if fresh:
        group_key = _group_key(db, group)
        for_all(
            db,
            "INSERT INTO samples (sample_id, run, grp, step, state, attempt) VALUES {rows}",
            [(sample_id, run, group_key, group.step, State.ISSUED, group.attempt) for sample_id in fresh],
        )
        log(db, [Event(run, sample_id, group.attempt, None, State.ISSUED) for sample_id in fresh])
        tally(db, run, {(State.ISSUED, ""): len(fresh)})
        db.execute("UPDATE runs SET admitted = admitted + ? WHERE key = ?", (len(fresh), run))
    repeated = tuple(sample.sample_id for sample in strangers)
    count_ignored(db, run, duplicates=len(repeated))
    return Recorded(tuple(fresh), repeated)


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
        f"UPDATE samples SET state = {State.ISSUED:d}, attempt = {attempt:d}, generator = '' "
        "WHERE key IN (VALUES {rows})",
        keys(samples),
    )
    for_all(db, "DELETE FROM payloads WHERE sample IN (VALUES {rows})", keys(samples))
    log(
        db,
        [Event(s.run, s.sample_id, attempt, s.state, State.ISSUED, detail=why) for s in samples],
    )
    tally_moves(db, samples, State.ISSUED)


def generated(db: sqlite3.Connection, delivered: Sequence[GeneratedSample]) -> Recorded:
    """Keep finished responses whose scores come later."""
    fresh, recorded = _sort_out(db, delivered, (State.ISSUED,))
    _store_responses(db, fresh)
    for_all(
        db,
        f"UPDATE samples SET state = {State.GENERATED:d}, generator = new.column2, truncated = new.column3 "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(known.key, sample.generator, sample.truncated) for known, sample in fresh],
    )
    tally_moves(db, [known for known, _ in fresh], State.GENERATED)
    return recorded


def scored(db: sqlite3.Connection, delivered: Sequence[ScoredSample]) -> Recorded:
    """Keep rewards, and the responses with them where they are not there yet."""
    fresh, recorded = _sort_out(db, delivered, (State.ISSUED, State.GENERATED))
    arrived = [(known, sample) for known, sample in fresh if known.state is State.ISSUED]
    _store_responses(db, arrived)
    for_all(
        db,
        f"UPDATE samples SET {_REWARDED}, generator = new.column5, truncated = new.column6 "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(known.key, *_rewarded(s), s.generator, s.truncated) for known, s in arrived],
    )
    for_all(
        db,
        f"UPDATE samples SET {_REWARDED} FROM (VALUES {{rows}}) AS new WHERE key = new.column1",
        [(known.key, *_rewarded(s)) for known, s in fresh if known.state is not State.ISSUED],
    )
    log(
        db,
        [
            Event(known.run, sample.sample_id, sample.attempt, State.GENERATED, State.SCORED)
            for known, sample in fresh
        ],
    )
    tally_moves(db, [known for known, _ in fresh], State.SCORED)
    return recorded


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
    rows = db.execute(
        "SELECT s.sample_id FROM samples s JOIN groups g ON g.key = s.grp "
        "WHERE s.run = ? AND g.group_id IN (SELECT value FROM json_each(?))",
        (run, json.dumps(list(group_ids))),
    ).fetchall()
    samples = all_known(db, [sample_id for (sample_id,) in rows])
    trained = [sample for sample in samples if sample.state not in (*IN_FLIGHT, State.DROPPED)]
    if trained:
        raise FailedPrecondition(
            f"sample {trained[0].sample_id} is {trained[0].state.name.lower()} and cannot count for step {step}",
            where=run_id,
            why=f"update {trained[0].update_id} has trained it",
        )
    for_all(db, f"UPDATE samples SET step = {step:d} WHERE key IN (VALUES {{rows}})", keys(samples))


def drop_in_flight(db: sqlite3.Connection, run_id: str, reason: str) -> int:
    """Drop everything of a run that was neither trained nor dropped; the number of samples."""
    rows = db.execute(
        "SELECT sample_id FROM samples WHERE run = ? AND state IN (?, ?, ?) ORDER BY key",
        (run_key(db, run_id), *IN_FLIGHT),
    ).fetchall()
    return len(dropped(db, run_id, [sample_id for (sample_id,) in rows], reason).accepted)


def _sort_out(
    db: sqlite3.Connection, delivered: Sequence[S], open_states: tuple[State, ...]
) -> tuple[list[tuple[Known, S]], Recorded]:
    """Split a delivery into what is new, what came before, and what came too late."""
    known = all_known(db, [sample.sample_id for sample in delivered])
    fresh = [(k, s) for k, s in zip(known, delivered, strict=True) if k.state in open_states]
    late = tuple(k.sample_id for k in known if k.state is State.DROPPED)
    duplicates = tuple(
        k.sample_id for k in known if k.state not in open_states and k.state is not State.DROPPED
    )
    if known:
        count_ignored(db, known[0].run, duplicates=len(duplicates), late=len(late))
    return fresh, Recorded(tuple(s.sample_id for _, s in fresh), duplicates, late)


def _store_responses(db: sqlite3.Connection, fresh: Sequence[tuple[Known, GeneratedSample]]) -> None:
    """Payloads, and the step to GENERATED in the event log; the samples' own rows are the caller's."""
    for _, sample in fresh:
        if len(sample.token_ids) != len(sample.logprobs):
            raise InvalidRequest(
                f"sample {sample.sample_id} has {len(sample.token_ids)} tokens "
                f"but {len(sample.logprobs)} logprobs"
            )
    for_all(
        db,
        "INSERT INTO payloads (sample, token_ids, logprobs, spans, text) VALUES {rows}",
        [
            (
                known.key,
                np.ascontiguousarray(s.token_ids, dtype="<i4").data,
                np.ascontiguousarray(s.logprobs, dtype="<f4").data,
                spans_to_bytes(s.spans),
                s.text,
            )
            for known, s in fresh
        ],
    )
    log(
        db,
        [
            Event(known.run, s.sample_id, s.attempt, known.state, State.GENERATED, s.oldest_version)
            for known, s in fresh
        ],
    )


def _rewarded(sample: ScoredSample) -> tuple[float, bytes, float | None]:
    """Values of these columns."""
    return sample.reward, terms_to_bytes(sample.reward_terms), sample.greedy_reward


def spans_to_bytes(spans: Sequence[TokenSpan]) -> bytes:
    """Four little-endian int64 a span: lineage, step, start, end."""
    rows = [(span.version.lineage, span.version.step, span.start, span.end) for span in spans]
    return np.array(rows, dtype="<i8").tobytes()


def terms_to_bytes(terms: Sequence[float]) -> bytes:
    """Little-endian float64."""
    return np.array(terms, dtype="<f8").tobytes()


def _group_key(db: sqlite3.Connection, group: GroupIssue) -> int:
    db.execute(
        "INSERT OR IGNORE INTO groups (group_id, prompt_text, prompt_token_ids) VALUES (?, ?, ?)",
        (
            group.group_id,
            group.prompt_text,
            np.ascontiguousarray(group.prompt_token_ids, dtype="<i4").data,
        ),
    )
    return int(db.execute("SELECT key FROM groups WHERE group_id = ?", (group.group_id,)).fetchone()[0])
