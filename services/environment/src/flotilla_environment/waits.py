"""Counts how long an episode waits for what it shares with others: its worker, and the processors of programs.

What it does once more because a worker was lost is such a wait, too.

Invariant: these seconds are no time of its environment's own, so a caller that bounds an episode leaves them out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Waits:
    """The waits of one episode."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None
        """The time when the wait that is under way began."""
        self._once_more = False

    def begin(self) -> None:
        """Begin a wait, where none is under way."""
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """End the wait that is under way, if there is one; where turns are played again, it lasts until all are."""
        if self._once_more:
            return
        self._ended_s, self._since = self.total_s, None

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Count all the time of a block, in which turns are played again."""
        self.begin()
        self._once_more = True
        try:
            yield
        finally:
            self._once_more = False
            self.end()

    @property
    def total_s(self) -> float:
        """Return the time so far."""
        return self._ended_s + (0.0 if self._since is None else time.monotonic() - self._since)
