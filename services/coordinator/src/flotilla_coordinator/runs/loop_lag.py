"""How late the event loop gives a turn to somebody who asks for one: what every call and every timer waits as well."""

from __future__ import annotations

import asyncio

ASK_EVERY_S = 0.02


class LoopLag:
    """Asks the running loop for a turn again and again, until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_s: list[float] = []
        self._ask()

    def take_metrics(self) -> dict[str, float]:
        """The 99th percentile and the longest since the last call."""
        late_s, self._late_s = sorted(self._late_s), []
        if not late_s:
            return {}
        return {
            "coordinator/loop_lag_p99_s": late_s[len(late_s) * 99 // 100],
            "coordinator/loop_lag_max_s": late_s[-1],
        }

    async def close(self) -> None:
        """Ask no more."""
        self._timer.cancel()

    def _ask(self) -> None:
        self._due = self._loop.time() + ASK_EVERY_S
        self._timer = self._loop.call_at(self._due, self._answered)

    def _answered(self) -> None:
        self._late_s.append(max(0.0, self._loop.time() - self._due))
        self._ask()
