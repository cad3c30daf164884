"""The transitions of a sample up to an update: admitted, generated, scored, dropped, or carried over.

Invariants of every transition, in any module: it is checked against the stored state before anything changes. An
illegal transition raises an error that names the sample and both states, and changes nothing. Each one adds one row to
the append-only `transitions`, and changes the tallies in the same transaction. Attempts are not part of a sample's
identity.

A group is recorded before any generator gets its samples. It is admitted once, however often that is requested, and
refused whole where it cannot be admitted or has a sample of another group. The first delivery of a sample counts, of
any attempt; a repeated or late delivery is counted and changes nothing. All groups, or all deliveries, that callers
submit at once are one operation, which is refused whole where one of them is refused, or where a sample is in two of
them.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from flotilla_coordinator.ledger import episodes, rows, turns, verdicts
from flotilla_coordinator.ledger.records import (
    START,
    DropReason,
    FinishedSample,
    GroupIssue,
    Recorded,
    SampleState,
)
from flotilla_core.errors import FailedPrecondition, InvalidRequest

State = SampleState
IN_FLIGHT = (State.ISSUED, State.GENERATED, State.SCORED)

NOT_JUDGED: Mapping[str, Sequence[verdicts.TermVerdict]] = {}

MOST_PAYLOADS = 32
"""The most payloads of one statement, a power of two: each may have many tokens."""
_REWARDED = (
    f"state = {State.SCORED:d}, reward = new.column2, reward_terms = new.column3, greedy_reward = new.column4, "
    "verdicts = new.column5"
)


def issue(db: sqlite3.Connection, groups: Sequence[GroupIssue]) -> list[Recorded]:
    """Admit the samples of groups that are not recorded yet."""
    runs = {run_id: rows.run_key(db, run_id) for run_id in {group.run_id for group in groups}}
    known = rows.lookup(db, [sample_id for group in groups for sample_id in group.sample_ids])
    recorded = []
    for group in groups:
        before = [known[sample_id] for sample_id in group.sample_ids if sample_id in known]
        if any(sample.run != runs[group.run_id] for sample in before):
            raise InvalidRequest(f"group {group.group_id} holds samples of another run", where=group.run_id)
        fresh = tuple(sample_id for sample_id in group.sample_ids if sample_id not in known)
        recorded.append(Recorded(fresh, tuple(sample.sample_id for sample in before)))
        rows.count_ignored(db, runs[group.run_id], duplicates=len(before))
    if fresh_of := [(group, of.accepted) for group, of in zip(groups, recorded, strict=True) if of.accepted]:
        _admit(db, runs, fresh_of)
    return recorded


def _admit(
    db: sqlite3.Connection, runs: dict[str, int], fresh: Sequence[tuple[GroupIssue, Sequence[str]]]
) -> None:
    """Insert the samples of new groups."""
    group_keys = _group_keys(db, [group for group, _ in fresh])
    new = [(sample_id, runs[group.run_id], group) for group, sample_ids in fresh for sample_id in sample_ids]
    rows.for_all(
        db,
        "INSERT INTO samples (sample_id, run, grp, step, state, attempt) VALUES {rows}",
        [
            (sample_id, run, group_keys[group.group_id], group.step, State.ISSUED, group.attempt)
            for sample_id, run, group in new
        ],
    )
    rows.log(
        db, [rows.Event(run, sample_id, group.attempt, None, State.ISSUED) for sample_id, run, group in new]
    )
    admitted = Counter(run for _, run, _ in new)
    rows.tally(db, Counter({(run, State.ISSUED, ""): number for run, number in admitted.items()}))
    for run, number in admitted.items():
        db.execute("UPDATE runs SET admitted = admitted + ? WHERE key = ?", (number, run))


def _group_keys(db: sqlite3.Connection, groups: Sequence[GroupIssue]) -> dict[str, int]:
    """Return the keys of groups, and insert the new ones."""
    rows.for_all(
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


def generated(db: sqlite3.Connection, deliveries: Sequence[Sequence[FinishedSample]]) -> list[Recorded]:
    """Record finished responses whose scores come later."""
    fresh, recorded = _sort_out(db, deliveries, (State.ISSUED,))
    _store_responses(db, fresh)
    rows.for_all(
        db,
        f"UPDATE samples SET state = {State.GENERATED:d}, generator = new.column2, truncated = new.column3 "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(known.key, sample.generator, sample.truncated) for known, sample in fresh],
    )
    rows.tally_moves(db, [known for known, _ in fresh], State.GENERATED)
    return recorded


def scored(db: sqlite3.Connection, deliveries: Sequence[Sequence[FinishedSample]]) -> list[Recorded]:
    """Record rewards, and the responses with them where they are not recorded yet."""
    fresh, recorded = _sort_out(db, deliveries, (State.ISSUED, State.GENERATED))
    arrived = [(known, sample) for known, sample in fresh if known.state is State.ISSUED]
    _store_responses(db, arrived)
    rows.for_all(
        db,
        f"UPDATE samples SET {_REWARDED}, generator = new.column6, truncated = new.column7 "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(known.key, *_rewarded(s), s.generator, s.truncated) for known, s in arrived],
    )
    rows.for_all(
        db,
        f"UPDATE samples SET {_REWARDED} FROM (VALUES {{rows}}) AS new WHERE key = new.column1",
        [(known.key, *_rewarded(s)) for known, s in fresh if known.state is not State.ISSUED],
    )
    rows.log(
        db,
        [
            rows.Event(known.run, sample.sample_id, sample.attempt, State.GENERATED, State.SCORED)
            for known, sample in fresh
        ],
    )
    rows.tally_moves(db, [known for known, _ in fresh], State.SCORED)
    return recorded


def _sort_out(
    db: sqlite3.Connection, deliveries: Sequence[Sequence[FinishedSample]], open_states: tuple[State, ...]
) -> tuple[list[tuple[rows.Known, FinishedSample]], list[Recorded]]:
    """Split deliveries into new, repeated and late ones."""
    known = iter(rows.all_known(db, [sample.sample_id for delivered in deliveries for sample in delivered]))
    fresh: list[tuple[rows.Known, FinishedSample]] = []
    recorded = []
    for delivered in deliveries:
        pairs = [(next(known), sample) for sample in delivered]
        new = [pair for pair in pairs if pair[0].state in open_states]
        late = tuple(k.sample_id for k, _ in pairs if k.state is State.DROPPED)
        duplicates = tuple(
            k.sample_id for k, _ in pairs if k.state not in open_states and k.state is not State.DROPPED
        )
        if pairs:
            rows.count_ignored(db, pairs[0][0].run, duplicates=len(duplicates), late=len(late))
        fresh += new
        recorded.append(Recorded(tuple(k.sample_id for k, _ in new), duplicates, late))
    return fresh, recorded


def _store_responses(db: sqlite3.Connection, fresh: Sequence[tuple[rows.Known, FinishedSample]]) -> None:
    """Insert payloads, and the transition to GENERATED in the event log; the caller updates the samples' own rows."""
    for _, sample in fresh:
        logprobs = 0 if sample.logprobs is None else len(sample.logprobs)
        if len(sample.token_ids) != logprobs:
            raise InvalidRequest(
                f"sample {sample.sample_id} has {len(sample.token_ids)} tokens but {logprobs} logprobs"
            )
        if sample.trained is not None and len(sample.trained) != len(sample.token_ids):
            raise InvalidRequest(
                f"sample {sample.sample_id} has {len(sample.token_ids)} tokens but {len(sample.trained)} marks of "
                "which are trained"
            )
    rows.for_all(
        db,
        "INSERT INTO payloads (sample, token_ids, logprobs, spans, text, trained) VALUES {rows}",
        [
            (
                known.key,
                np.ascontiguousarray(s.token_ids, dtype="<i4").data,
                np.ascontiguousarray(() if s.logprobs is None else s.logprobs, dtype="<f4").data,
                turns.spans_to_bytes(s.spans),
                s.text,
                None if s.trained is None else np.ascontiguousarray(s.trained, dtype=np.bool_).tobytes(),
            )
            for known, s in fresh
        ],
        MOST_PAYLOADS,
    )
    episodes.store(db, ((known.key, sample) for known, sample in fresh))
    rows.log(
        db,
        [
            rows.Event(
                known.run, s.sample_id, s.attempt, known.state, State.GENERATED, s.oldest_version or START
            )
            for known, s in fresh
        ],
    )


def _rewarded(sample: FinishedSample) -> tuple[float, bytes, float | None, str]:
    """Return the values of the columns in `_REWARDED`."""
    said = verdicts.to_text(sample.verdicts)
    return sample.reward, terms_to_bytes(sample.reward_terms), sample.greedy_reward, said


def terms_to_bytes(terms: Sequence[float]) -> bytes:
    """Encode the terms as little-endian float64."""
    return np.array(terms, dtype="<f8").tobytes()


def dropped(
    db: sqlite3.Connection,
    run_id: str,
    sample_ids: Sequence[str],
    reason: DropReason,
    judged: Mapping[str, Sequence[verdicts.TermVerdict]] = NOT_JUDGED,
) -> Recorded:
    """Drop samples, for a reason that is counted, with the verdicts of those that were judged for it."""
    if not reason:
        raise InvalidRequest("a sample is dropped without a reason", where=run_id)
    run = rows.run_key(db, run_id)
    samples = rows.all_known(db, sample_ids)
    already = [sample for sample in samples if sample.state is State.DROPPED]
    leaving = [sample for sample in samples if sample.state is not State.DROPPED]
    rows.require(leaving, IN_FLIGHT, State.DROPPED)
    rows.for_all(
        db,
        f"UPDATE samples SET state = {State.DROPPED:d}, drop_reason = new.column2, "
        "verdicts = iif(new.column3 = '', verdicts, new.column3) "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(sample.key, reason, verdicts.to_text(judged.get(sample.sample_id, ()))) for sample in leaving],
    )
    rows.log(
        db,
        [rows.Event(run, s.sample_id, s.attempt, s.state, State.DROPPED, detail=reason) for s in leaving],
    )
    rows.tally_moves(db, leaving, State.DROPPED, reason)
    rows.count_ignored(db, run, duplicates=len(already))
    return Recorded(
        tuple(sample.sample_id for sample in leaving), tuple(sample.sample_id for sample in already)
    )


def carry_over(db: sqlite3.Connection, run_id: str, group_ids: Sequence[str], step: int) -> None:
    """Let whole groups count for another step; no sample changes its state."""
    run = rows.run_key(db, run_id)
    of_groups = (
        "JOIN groups g ON g.key = s.grp WHERE s.run = ? AND g.group_id IN (SELECT value FROM json_each(?))"
    )
    samples = rows.all_known(db, rows.admitted_ids(db, of_groups, (run, json.dumps(list(group_ids)))))
    trained = [sample for sample in samples if sample.state not in (*IN_FLIGHT, State.DROPPED)]
    if trained:
        raise FailedPrecondition(
            f"sample {trained[0].sample_id} is {trained[0].state.name.lower()} and cannot count for step {step}",
            where=run_id,
            why=f"update {trained[0].update_id} has trained it",
        )
    rows.for_all(
        db,
        "UPDATE samples SET step = new.column2 FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(sample.key, step) for sample in samples],
    )


def drop_in_flight(db: sqlite3.Connection, run_id: str, reason: DropReason) -> int:
    """Drop all samples of a run that were neither trained nor dropped; return their number."""
    open_ = rows.admitted_ids(
        db, "WHERE s.run = ? AND s.state IN (?, ?, ?)", (rows.run_key(db, run_id), *IN_FLIGHT)
    )
    return len(dropped(db, run_id, open_, reason).accepted)
