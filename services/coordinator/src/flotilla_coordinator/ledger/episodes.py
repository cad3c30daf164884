"""Stores what samples of several turns have in addition to their first sequence.

Invariants: arrays are stored byte for byte, as those of payloads. A sample of one turn has no row here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from flotilla_coordinator.ledger import rows
from flotilla_coordinator.ledger.records import Branch, Ending, Episode, FinishedSample, TokenSpan
from flotilla_core.errors import InvalidRequest
from flotilla_core.version import Version

MOST_AT_ONCE = 32


def require_whole(sample: FinishedSample) -> None:
    """Refuse an episode with a branch whose columns have different lengths."""
    for branch in () if sample.episode is None else sample.episode.branches:
        if not len(branch.token_ids) == len(branch.logprobs) == len(branch.trained):
            raise InvalidRequest(f"a branch of sample {sample.sample_id} has columns of different lengths")


def store(db: sqlite3.Connection, samples: Iterable[tuple[int, FinishedSample]]) -> None:
    """Insert the episodes of samples, each with the key of its row."""
    rows.for_all(
        db,
        "INSERT INTO episodes (sample, ending, turns, turn_rewards, messages, prompt_token_ids, branches) "
        "VALUES {rows}",
        [
            (
                key,
                episode.ending,
                episode.turns,
                np.array(episode.turn_rewards, "<f8").tobytes(),
                episode.messages,
                episode.prompt_token_ids.astype("<i4").tobytes(),
                b"".join(_branch_bytes(branch) for branch in episode.branches),
            )
            for key, episode in ((key, sample.episode) for key, sample in samples)
            if episode is not None
        ],
        MOST_AT_ONCE,
    )


def load(db: sqlite3.Connection, keys: Sequence[int]) -> dict[int, Episode]:
    """Return the episodes of these rows."""
    found: dict[int, Episode] = {}
    for start in range(0, len(keys), rows.MOST_ROWS):
        some = keys[start : start + rows.MOST_ROWS]
        for key, ending, turns, rewards, messages, prompt, branches in db.execute(
            "SELECT sample, ending, turns, turn_rewards, messages, prompt_token_ids, branches FROM episodes "
            f"WHERE sample IN ({', '.join('?' * len(some))})",
            some,
        ):
            found[key] = Episode(
                ending=Ending(ending),
                turns=turns,
                turn_rewards=tuple(np.frombuffer(rewards, "<f8").tolist()),
                messages=messages,
                prompt_token_ids=np.frombuffer(prompt, "<i4"),
                branches=tuple(_branches(branches)),
            )
    return found


def spans_to_bytes(spans: Sequence[TokenSpan]) -> bytes:
    """Encode each span as four little-endian int64: lineage, step, start, end."""
    numbers = [(span.version.lineage, span.version.step, span.start, span.end) for span in spans]
    return np.array(numbers, dtype="<i8").tobytes()


def spans_of_bytes(data: bytes) -> tuple[TokenSpan, ...]:
    """Return spans as they were encoded."""
    numbers = np.frombuffer(data, dtype="<i8").reshape(-1, 4).tolist()
    return tuple(TokenSpan(Version(lineage, step), start, end) for lineage, step, start, end in numbers)


def _branch_bytes(branch: Branch) -> bytes:
    """Encode a branch as the sizes of its columns and the columns."""
    columns = [
        np.ascontiguousarray(branch.prompt_token_ids, "<i4").tobytes(),
        np.ascontiguousarray(branch.token_ids, "<i4").tobytes(),
        np.ascontiguousarray(branch.logprobs, "<f4").tobytes(),
        np.ascontiguousarray(branch.trained, np.bool_).tobytes(),
        spans_to_bytes(branch.spans),
    ]
    return b"".join([np.array([len(column) for column in columns], "<i8").tobytes(), *columns])


def _branches(data: bytes) -> Iterator[Branch]:
    place = 0
    while place < len(data):
        sizes = np.frombuffer(data, "<i8", count=5, offset=place).tolist()
        place += 5 * 8
        columns = []
        for size in sizes:
            columns.append(data[place : place + size])
            place += size
        prompt, token_ids, logprobs, trained, spans = columns
        yield Branch(
            np.frombuffer(prompt, "<i4"),
            np.frombuffer(token_ids, "<i4"),
            np.frombuffer(logprobs, "<f4"),
            np.frombuffer(trained, "?"),
            spans_of_bytes(spans),
        )
