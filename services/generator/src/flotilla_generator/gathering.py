"""Samples that end at nearly the same time share one message.

A message costs both sides more than the sample in it, and whoever takes them may say how long one that has ended can
wait. Invariants: no sample waits longer than that, and the last ones not at all; what an engine yields together stays
together; an engine that fails does so only after what it had yielded was handed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from flotilla_generator.engine.base import Sample


async def gathered(endings: AsyncGenerator[list[Sample]], wait_s: float) -> AsyncGenerator[list[Sample]]:
    """What ends within `wait_s` after the first, together; closing it closes `endings`."""
    if not wait_s:
        async with aclosing(endings):
            async for samples in endings:
                yield samples
        return
    arrived: list[Sample] = []
    news = asyncio.Event()

    async def take() -> None:
        try:
            async with aclosing(endings):
                async for samples in endings:
                    arrived.extend(samples)
                    news.set()
        finally:
            news.set()

    taking = asyncio.create_task(take(), name="gather")
    try:
        # More may arrive, and the last of all, while those before are handed on.
        while arrived or not taking.done():
            await news.wait()
            if not taking.done():
                await asyncio.wait({taking}, timeout=wait_s)
            news.clear()
            if arrived:
                together, arrived = arrived, []
                yield together
        await taking
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
