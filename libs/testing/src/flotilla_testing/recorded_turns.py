"""Compares the turns that the ledger has when something happens to a run with those that are trained later.

Invariant: turns that are recorded are trained as they were recorded, tokens and log-probabilities, byte for byte.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flotilla_testing.chaos_run import ChaosRun


class _Columns(NamedTuple):
    token_ids: bytes = b""
    logprobs: bytes = b""


class RecordedTurns:
    """Turns of episodes that had not ended when they were noted."""

    def __init__(self, run: ChaosRun) -> None:
        self._run = run
        self._noted: dict[str, _Columns] = {}
        self.trained = 0
        """Episodes that were noted, and then trained with these turns."""

    @property
    def waiting(self) -> list[str]:
        """Episodes that were noted and are not trained yet, by their ids."""
        return list(self._noted)

    def note(self) -> int:
        """Note all turns that are recorded now; return the number of their episodes."""
        rows = self._run.ask_ledger(
            "SELECT s.sample_id, t.token_ids, t.logprobs FROM turns t JOIN samples s ON s.key = t.sample "
            "JOIN runs r ON r.key = s.run WHERE r.run_id = ? ORDER BY t.sample, t.number"
        )
        found: dict[str, _Columns] = {}
        for sample_id, token_ids, logprobs in rows:
            before = found.get(sample_id, _Columns())
            found[sample_id] = _Columns(before.token_ids + token_ids, before.logprobs + logprobs)
        self._noted |= found
        return len(found)

    def compare(self) -> None:
        """Compare those that are trained by now with what was noted."""
        if not self._noted:
            return
        rows = self._run.ask_ledger(
            "SELECT s.sample_id, p.token_ids, p.logprobs, p.trained FROM payloads p "
            "JOIN samples s ON s.key = p.sample JOIN runs r ON r.key = s.run "
            "WHERE r.run_id = ? AND s.update_key IS NOT NULL"
        )
        for sample_id, token_ids, logprobs, trained in rows:
            noted = self._noted.pop(sample_id, None)
            if noted is None:
                continue
            written = np.frombuffer(trained, "?")
            tokens = np.frombuffer(token_ids, "<i4")[written].tobytes()
            assert tokens.startswith(noted.token_ids), f"{sample_id} was trained with other turns"
            said = np.frombuffer(logprobs, "<f4")[written].tobytes()
            assert said.startswith(noted.logprobs), f"{sample_id} was trained with other log-probabilities"
            self.trained += 1
