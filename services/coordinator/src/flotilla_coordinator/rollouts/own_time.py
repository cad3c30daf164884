"""The time that an environment takes itself in one episode.

Invariant: turns of the policy and waits on the replica, for a worker or a processor, are not in it: they say nothing
about an episode, and grow with the load. The replica tells how long an episode has waited there, with all that it says.
"""

from __future__ import annotations

import time

LATE_S = 10.0
"""Two beats of a replica: the time after the limit in which it may tell that the episode was waiting."""


class OwnTime:
    """The time that the environment of one episode has left."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._left_s = limit_s
        self._waited_s = 0.0
        """The waits that the replica has told so far."""
        self._since = 0.0

    def begin(self) -> None:
        """Count from now on: the environment has to say something."""
        self._since = time.monotonic()

    def count(self, waited_s: float) -> bool:
        """Count what passed, but for waits, `waited_s` since the start of the episode; return whether too much has."""
        now = time.monotonic()
        passed_s = now - self._since
        self._left_s -= passed_s - min(passed_s, max(0.0, waited_s - self._waited_s))
        self._since, self._waited_s = now, waited_s
        return self._left_s < 0

    @property
    def most_s(self) -> float | None:
        """The time after which no word of the replica's can help any more; None: there is none."""
        return self._left_s + LATE_S if self._left_s < float("inf") else None
