"""Counts how long an episode waits for what it shares with others: its worker, and the processors of programs.

Invariant: these seconds are no time of its environment's own, so a caller that bounds an episode leaves them out.
"""

from __future__ import annotations

import time


class Waits:
    """The waits of one episode."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None
        """The time when the wait that is under way began."""

    def begin(self) -> None:
        """Begin a wait, where none is under way."""
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """End the wait that is under way, if there is one."""
        self._ended_s, self._since = self.total_s, None

    @property
    def total_s(self) -> float:
        """Return the time so far."""
        return self._ended_s + (0.0 if self._since is None else time.monotonic() - self._since)
