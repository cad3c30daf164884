"""Stores the turns of episodes that are under way, so that a coordinator that comes back goes on with them.

Invariants: only a sample that is issued has turns here; a trigger removes them with that state. A turn takes the place
of an earlier one with its number. Those that count are the first ones that one beginning of the episode played.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Sequence

import numpy as np

from flotilla_coordinator.ledger import rows
from flotilla_coordinator.ledger.records import SampleState, TokenSpan, TurnRecord
from flotilla_core.version import Version

MOST_AT_ONCE = 32


def store(db: sqlite3.Connection, turns: Sequence[TurnRecord]) -> None:
    """Insert turns of issued samples; those of other ones are left out."""
    rows.for_all(
        db,
        "INSERT OR REPLACE INTO turns SELECT s.key, new.column2, new.column3, new.column4, new.column5, new.column6, "
        "new.column7, new.column8, new.column9, new.column10, new.column11 FROM (VALUES {rows}) AS new "
        f"JOIN samples s ON s.sample_id = new.column1 WHERE s.state = {SampleState.ISSUED:d}",
        [
            (
                turn.sample_id,
                turn.number,
                turn.beginning,
                turn.attempt,
                turn.asked,
                np.ascontiguousarray(turn.token_ids, "<i4").data,
                np.ascontiguousarray(turn.logprobs, "<f4").data,
                spans_to_bytes(turn.spans),
                turn.text,
                turn.truncated,
                turn.generator,
            )
            for turn in turns
        ],
        MOST_AT_ONCE,
    )
    # Later turns of an earlier beginning, or behind one that could not be written, were said after other words.
    db.executemany(
        "DELETE FROM turns WHERE sample = (SELECT key FROM samples WHERE sample_id = ?) AND number > ?",
        {turn.sample_id: turn.number for turn in turns}.items(),
    )


def load(db: sqlite3.Connection, samples: dict[int, str]) -> dict[int, tuple[TurnRecord, ...]]:
    """Return the turns of samples, which are named by the keys of their rows."""
    found: dict[int, tuple[TurnRecord, ...]] = {}
    keys = list(samples)
    for start in range(0, len(keys), rows.MOST_ROWS):
        some = keys[start : start + rows.MOST_ROWS]
        every = db.execute(
            "SELECT sample, number, beginning, attempt, asked, token_ids, logprobs, spans, text, truncated, generator "
            f"FROM turns WHERE sample IN ({', '.join('?' * len(some))}) ORDER BY sample, number",
            some,
        )
        for key, of_sample in itertools.groupby(every, key=lambda row: int(row[0])):
            turns = [_turn(samples[key], row) for row in of_sample]
            first = itertools.takewhile(
                lambda pair, beginning=turns[0].beginning: (  # type: ignore[misc]
                    pair[1].number == pair[0] and pair[1].beginning == beginning
                ),
                enumerate(turns),
            )
            found[key] = tuple(turn for _, turn in first)
    return found


def _turn(sample_id: str, row: tuple[object, ...]) -> TurnRecord:
    _, number, beginning, attempt, asked, token_ids, logprobs, spans, text, truncated, generator = row
    assert isinstance(token_ids, bytes) and isinstance(logprobs, bytes) and isinstance(asked, bytes)
    return TurnRecord(
        sample_id=sample_id,
        number=int(str(number)),
        beginning=int(str(beginning)),
        attempt=int(str(attempt)),
        asked=asked,
        token_ids=np.frombuffer(token_ids, "<i4"),
        logprobs=np.frombuffer(logprobs, "<f4"),
        spans=spans_of(spans),
        text=str(text),
        truncated=bool(truncated),
        generator=str(generator),
    )


def spans_to_bytes(spans: Sequence[TokenSpan]) -> bytes:
    """Encode each span as four little-endian int64: lineage, step, start, end."""
    numbers = [(span.version.lineage, span.version.step, span.start, span.end) for span in spans]
    return np.array(numbers, dtype="<i8").tobytes()


def spans_of(data: object) -> tuple[TokenSpan, ...]:
    """Return the spans that these bytes encode; none where there are no bytes."""
    if not isinstance(data, bytes):
        return ()
    numbers = np.frombuffer(data, dtype="<i8").reshape(-1, 4).tolist()
    return tuple(TokenSpan(Version(lineage, step), start, end) for lineage, step, start, end in numbers)
