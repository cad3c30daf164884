"""What arrives for samples: their responses, and their rewards.

Invariants: as for every step of a sample; its first delivery counts, whichever attempt it came from; what comes again
or too late is counted and changes nothing. All deliveries that callers bring at once are one operation, refused whole
where one of them is, or where a sample is in two of them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from flotilla_coordinator.ledger.records import (
    GeneratedSample,
    Recorded,
    SampleState,
    ScoredSample,
    TokenSpan,
)
from flotilla_coordinator.ledger.rows import Event, Known, all_known, count_ignored, for_all, log, tally_moves
from flotilla_core.errors import InvalidRequest

S = TypeVar("S", bound=GeneratedSample)
State = SampleState
MOST_PAYLOADS = 32
"""In one statement, a power of two: they may have many tokens each."""
_REWARDED = (
    f"state = {State.SCORED:d}, reward = new.column2, reward_terms = new.column3, greedy_reward = new.column4"
)


def generated(db: sqlite3.Connection, deliveries: Sequence[Sequence[GeneratedSample]]) -> list[Recorded]:
    """Keep finished responses whose scores come later."""
    fresh, recorded = _sort_out(db, deliveries, (State.ISSUED,))
    _store_responses(db, fresh)
    for_all(
        db,
        f"UPDATE samples SET state = {State.GENERATED:d}, generator = new.column2, truncated = new.column3 "
        "FROM (VALUES {rows}) AS new WHERE key = new.column1",
        [(known.key, sample.generator, sample.truncated) for known, sample in fresh],
    )
    tally_moves(db, [known for known, _ in fresh], State.GENERATED)
    return recorded


def scored(db: sqlite3.Connection, deliveries: Sequence[Sequence[ScoredSample]]) -> list[Recorded]:
    """Keep rewards, and the responses with them where they are not there yet."""
    fresh, recorded = _sort_out(db, deliveries, (State.ISSUED, State.GENERATED))
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


def _sort_out(
    db: sqlite3.Connection, deliveries: Sequence[Sequence[S]], open_states: tuple[State, ...]
) -> tuple[list[tuple[Known, S]], list[Recorded]]:
    """Split deliveries into what is new, what came before, and what came too late."""
    known = iter(all_known(db, [sample.sample_id for delivered in deliveries for sample in delivered]))
    fresh: list[tuple[Known, S]] = []
    recorded = []
    for delivered in deliveries:
        pairs = [(next(known), sample) for sample in delivered]
        new = [pair for pair in pairs if pair[0].state in open_states]
        late = tuple(k.sample_id for k, _ in pairs if k.state is State.DROPPED)
        duplicates = tuple(
            k.sample_id for k, _ in pairs if k.state not in open_states and k.state is not State.DROPPED
        )
        if pairs:
            count_ignored(db, pairs[0][0].run, duplicates=len(duplicates), late=len(late))
        fresh += new
        recorded.append(Recorded(tuple(k.sample_id for k, _ in new), duplicates, late))
    return fresh, recorded


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
        MOST_PAYLOADS,
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
