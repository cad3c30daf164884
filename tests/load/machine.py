"""How fast this machine computes and how late it wakes by itself: what figures of load are judged against."""

from __future__ import annotations

import asyncio
import time

from flotilla_coordinator.runs.context import LoopLag

LOOP_S = 0.06
"""CPU seconds of the fixed loop on the machine that the figures of this folder are from: two cores of 2026."""
TRIES = 9
WATCHED_S = 5.0


def slowness() -> float:
    """Return how much longer a fixed loop of plain Python takes here than on the machine of the figures.

    The shortest of several tries: what else runs can only make one longer.
    """
    return min(_loop_s() for _ in range(TRIES)) / LOOP_S


def idle_lag_p99_s() -> float:
    """Return how late an event loop without work gets its turns, by the coordinator's own measure."""

    async def watched() -> dict[str, float]:
        lag = LoopLag()
        await asyncio.sleep(WATCHED_S)
        await lag.close()
        return lag.take_metrics()

    return asyncio.run(watched())["coordinator/loop_lag_p99_s"]


def _loop_s() -> float:
    began = time.process_time()
    counts: dict[str, int] = {}
    for number in range(300_000):
        word = str(number % 1024)
        counts[word] = counts.get(word, 0) + number
    return time.process_time() - began
