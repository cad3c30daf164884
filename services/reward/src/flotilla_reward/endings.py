"""Tasks in the order in which they end, with signs of life while none does.

Invariants: whoever goes through them hears something every `SIGN_OF_LIFE_S`, for as long as the loop of this process
turns; every task comes once; leaving early ends those that still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")

SIGN_OF_LIFE_S = 5.0
"""A caller takes a replica for dead that is silent for several times as long."""


async def endings(tasks: Sequence[asyncio.Task[T]]) -> AsyncGenerator[list[asyncio.Task[T]]]:
    """Those that ended since the last time, together; none at all is a sign of life."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[asyncio.Task[T] | None] = asyncio.Queue()
    timer: asyncio.TimerHandle

    # One timer for all tasks: it costs nothing where they end fast.
    def sign() -> None:
        nonlocal timer
        ended.put_nowait(None)
        timer = loop.call_later(SIGN_OF_LIFE_S, sign)

    timer = loop.call_later(SIGN_OF_LIFE_S, sign)
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    left = len(tasks)
    try:
        while left:
            together = [await ended.get()]
            while not ended.empty():
                together.append(ended.get_nowait())
            new = [task for task in together if task is not None]
            left -= len(new)
            yield new
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
