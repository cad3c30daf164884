"""The notes that vLLM's engine process takes of a sample; they reach the service with its last token.

Invariants: a sample has one log-probability for each of its tokens, and it is the float32 that vLLM computed; times are
of the monotonic clock, which all processes of a host share. The service and the engine process both import this module,
so it needs neither vLLM nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NO_LOGPROBS: NDArray[np.float32] = np.empty(0, np.float32)


@dataclass(frozen=True)
class SampleRecord:
    """The facts of a sample beside its tokens."""

    logprobs: NDArray[np.float32]
    first_token_at: float | None = None
    resumed: tuple[tuple[float, int], ...] = ()
    """The times at which decoding resumed after a pause, each with the number of tokens that the sample had then."""
    waiting: int = 0
    """Samples without a place in the engine when this one ended."""

    def written(self) -> dict[str, Any]:
        """Return the record as vLLM can carry it."""
        return {
            "logprobs": self.logprobs.tobytes(),
            "first_token_at": self.first_token_at,
            "resumed": self.resumed,
            "waiting": self.waiting,
        }

    @classmethod
    def read(cls, written: dict[str, Any] | None) -> SampleRecord:
        """Return the record that vLLM carried; it carries none for a request that it refused."""
        if written is None:
            return cls(NO_LOGPROBS)
        return cls(
            logprobs=np.frombuffer(written["logprobs"], np.float32),
            first_token_at=written["first_token_at"],
            resumed=tuple((when, position) for when, position in written["resumed"]),
            waiting=written["waiting"],
        )


class LogprobTable:
    """Log-probabilities of the samples that have not ended: a row for each sample, a column for each token."""

    def __init__(self, rows: int, columns: int) -> None:
        self._values = np.empty((rows, columns), np.float32)
        self._written = np.zeros(rows, np.int64)
        self._free = list(reversed(range(rows)))

    def take(self) -> int:
        """Return the row of a new sample."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def append(self, rows: ArrayLike, values: NDArray[np.float32]) -> None:
        """Add one value to each of these rows, which differ."""
        at = np.asarray(rows)
        positions = self._written[at]
        self._values[at, positions] = values
        self._written[at] = positions + 1

    def extend(self, row: int, values: NDArray[np.float32]) -> None:
        """Add several values to one row."""
        start = int(self._written[row])
        self._values[row, start : start + len(values)] = values
        self._written[row] = start + len(values)

    def give_back(self, row: int) -> NDArray[np.float32]:
        """Return the values of a row and free it."""
        values = self._values[row, : self._written[row]].copy()
        self._written[row] = 0
        self._free.append(row)
        return values

    def _grow(self) -> None:
        """Double the rows: preempted samples keep theirs, so that more samples have tokens than decode at once."""
        rows, columns = self._values.shape
        values = np.empty((2 * rows, columns), np.float32)
        for row, written in enumerate(self._written):
            values[row, :written] = self._values[row, :written]
        self._values = values
        self._written = np.concatenate([self._written, np.zeros(rows, np.int64)])
        self._free = list(reversed(range(rows, 2 * rows)))
