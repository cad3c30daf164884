"""The restart budget of a process: a number of restarts within ten minutes, each after a longer wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

WINDOW_S = 600.0
_BACKOFF_S = (0.2, 1.0, 3.0, 10.0)


class RestartBudget:
    """Counts the restarts of one process; the next launcher continues with the count."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent: deque[float] = deque()

    @property
    def spent(self) -> list[float]:
        """When, on the monotonic clock, which all processes of one boot share."""
        return list(self._spent)

    def refill(self, spent: Iterable[float] = ()) -> None:
        """Begin with a full budget, or with what a former launcher had left."""
        self._spent = deque(spent)

    def spend(self) -> float | None:
        """Seconds to wait before the restart that this call counts; None when nothing is left for one."""
        now = time.monotonic()
        while self._spent and now - self._spent[0] > WINDOW_S:
            self._spent.popleft()
        if len(self._spent) >= self._most:
            return None
        self._spent.append(now)
        return _BACKOFF_S[min(len(self._spent), len(_BACKOFF_S)) - 1]
