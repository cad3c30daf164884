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
        "INSERT INTO episodes (sample, ending, turns, turn_rewards, messages, branches, turn_ends) VALUES {rows}",
        [
            (
                key,
                episode.ending,
                episode.turns,
                np.array(episode.turn_rewards, "<f8").tobytes(),
                episode.messages,
                b"".join(_branch_bytes(branch) for branch in episode.branches),
                np.array(episode.turn_ends, "<i4").tobytes(),
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
    # A ledger that no coordinator of this release has opened does not say where turns end.
    ends_column = "turn_ends" if "turn_ends" in columns else "x''"
    for start in range(0, len(keys), rows.MOST_ROWS):
        some = keys[start : start + rows.MOST_ROWS]
        for key, ending, turns, rewards, messages, branches, ends in db.execute(
            f"SELECT sample, ending, turns, turn_rewards, messages, branches, {ends_column} FROM episodes "
            f"WHERE sample IN ({', '.join('?' * len(some))})",
            some,
        ):
            turn_rewards = tuple(np.frombuffer(rewards, "<f8").tolist())
            turn_ends = tuple(np.frombuffer(ends, "<i4").tolist())
            found[key] = Episode(ending, turns, turn_rewards, messages, tuple(_branches(branches)), turn_ends)
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
