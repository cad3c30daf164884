"""Counts of the samples of a run in each state, by the ledger's own tallies."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from flotilla.coordinator.v1 import coordinator_pb2 as pb

TRAINED = (pb.SAMPLE_STATE_CONSUMED, pb.SAMPLE_STATE_DURABLE)


@dataclass(frozen=True)
class Counts:
    """Every admitted sample is trained, dropped with a reason, or in flight."""

    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0
    duplicates: int = 0
    late: int = 0

    @property
    def holds(self) -> bool:
        """Whether no sample is missing or counted twice."""
        return self.admitted == self.trained + sum(self.dropped.values()) + self.in_flight


def counts_of(ledger: Path, run_id: str) -> Counts:
    """Read the tallies of a run from the file of its ledger."""
    with closing(sqlite3.connect(ledger)) as db:
        key, admitted, duplicates, late = db.execute(
            "SELECT key, admitted, duplicates, late FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        tallies = db.execute(
            "SELECT state, reason, samples FROM tallies WHERE run = ? AND samples != 0 ORDER BY reason",
            (key,),
        ).fetchall()
    trained = in_flight = 0
    dropped: dict[str, int] = {}
    for state, reason, samples in tallies:
        if state == pb.SAMPLE_STATE_DROPPED:
            dropped[reason] = samples
        elif state in TRAINED:
            trained += samples
        else:
            in_flight += samples
    return Counts(admitted, trained, dropped, in_flight, duplicates, late)
