"""How long an episode waits for what it shares with others: its worker, and the processors that programs run on.

Invariant: these seconds are no time of its environment's own, so a caller that bounds an episode leaves them out.
"""

from __future__ import annotations

import time


class Waits:
    """The waits of one episode."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None
        """When the wait that is under way began."""

    def begin(self) -> None:
        """A wait begins, where none is under way."""
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """The wait is over, where one was under way."""
        self._ended_s, self._since = self.total_s, None

    @property
    def total_s(self) -> float:
        """The time so far."""
        return self._ended_s + (0.0 if self._since is None else time.monotonic() - self._since)
