"""The lag of the event loop, seen by a turn that was asked for."""

from __future__ import annotations

import asyncio
import time

from flotilla_coordinator.runs.context import ASK_EVERY_S, LoopLag


async def test_what_blocks_the_loop_is_its_lag_once() -> None:
    lag = LoopLag()
    await asyncio.sleep(2 * ASK_EVERY_S)
    lag.take_metrics()
    time.sleep(0.2)  # noqa: ASYNC251 - this is what it measures
    await asyncio.sleep(2 * ASK_EVERY_S)
    assert lag.take_metrics()["coordinator/loop_lag_max_s"] >= 0.1
    assert lag.take_metrics() == {}
    await lag.close()
