"""Stores what samples of several turns have in addition to their tokens.

Invariants: prompts are stored byte for byte, as the tokens of payloads. A sample of one turn has no row here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from flotilla_coordinator.ledger import rows
from flotilla_coordinator.ledger.records import Branch, Episode, FinishedSample

MOST_AT_ONCE = 32


def store(db: sqlite3.Connection, samples: Iterable[tuple[int, FinishedSample]]) -> None:
    """Insert the episodes of samples, each with the key of its row."""
    rows.for_all(
        db,
        "INSERT INTO episodes (sample, ending, turns, turn_rewards, messages, branches, turn_ends, "
        "turn_states) VALUES {rows}",
        [
            (
                key,
                episode.ending,
                episode.turns,
                np.array(episode.turn_rewards, "<f8").tobytes(),
                episode.messages,
                b"".join(_branch_bytes(branch) for branch in episode.branches),
                np.array(episode.turn_ends, "<i4").tobytes(),
                np.array(episode.turn_states, "<i8").tobytes(),
            )
            for key, episode in ((key, sample.episode) for key, sample in samples)
            if episode is not None
        ],
        MOST_AT_ONCE,
    )


def load(db: sqlite3.Connection, keys: Sequence[int]) -> dict[int, Episode]:
    """Return the episodes of these rows."""
    found: dict[int, Episode] = {}
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info (episodes)")]
    # A ledger that no coordinator of this release has opened says neither where turns end nor in which states.
    ends_column, states_column = (name if name in columns else "x''" for name in ("turn_ends", "turn_states"))
    for start in range(0, len(keys), rows.MOST_ROWS):
        some = keys[start : start + rows.MOST_ROWS]
        for key, ending, turns, rewards, messages, branches, ends, states in db.execute(
            f"SELECT sample, ending, turns, turn_rewards, messages, branches, {ends_column}, {states_column} "
            f"FROM episodes WHERE sample IN ({', '.join('?' * len(some))})",
            some,
        ):
            found[key] = Episode(
                ending,
                turns,
                tuple(np.frombuffer(rewards, "<f8").tolist()),
                messages,
                tuple(_branches(branches)),
                tuple(np.frombuffer(ends, "<i4").tolist()),
                tuple(np.frombuffer(states, "<i8").tolist()),
            )
    return found


def _branch_bytes(branch: Branch) -> bytes:
    """Encode a branch as its start, the number of tokens of its prompt, and these."""
    sizes = np.array([branch.start, len(branch.prompt_token_ids)], "<i8")
    return sizes.tobytes() + np.ascontiguousarray(branch.prompt_token_ids, "<i4").tobytes()


def _branches(data: bytes) -> Iterator[Branch]:
    place = 0
    while place < len(data):
        start, length = np.frombuffer(data, "<i8", count=2, offset=place).tolist()
        yield Branch(start, np.frombuffer(data, "<i4", count=length, offset=place + 16))
        place += 16 + 4 * length
