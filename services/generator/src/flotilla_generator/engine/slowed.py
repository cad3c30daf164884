"""Any engine, made slow: each sample leaves when a slow one would have ended it.

Invariants: the engine inside decodes once, at its own speed, and what it says of a sample is passed on but for the
times; a sample that waits here leaves at once when it is aborted; waiting computes nothing. The
versions in its spans are those that really wrote it, also where weights changed while it waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from flotilla_core.config.generators import LatencyConfig
from flotilla_generator.engine.base import Engine, GenerationRequest, Sample


class SlowedEngine:
    """Holds samples back; in all else it is the engine inside."""

    def __init__(self, engine: Engine, latency: LatencyConfig) -> None:
        self._engine = engine
        self._latency = latency
        self._aborted: dict[str, asyncio.Event] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Sample]]:
        started = time.monotonic()
        aborted = self._aborted[request.request_id] = asyncio.Event()
        held: set[asyncio.Future[Sample]] = set()
        async with contextlib.aclosing(self._engine.generate(request)) as samples:
            arriving: asyncio.Future[list[Sample]] | None = asyncio.ensure_future(anext(samples, []))
            try:
                while arriving is not None or held:
                    awaited: set[asyncio.Future[Any]] = held if arriving is None else {arriving, *held}
                    done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                    if arriving is not None and arriving in done:
                        arrived = arriving.result()
                        arriving = None
                        if arrived:
                            held |= {
                                asyncio.ensure_future(self._hold(one, started, aborted)) for one in arrived
                            }
                            arriving = asyncio.ensure_future(anext(samples, []))
                    ended = done & held
                    held -= ended
                    if ended:
                        yield [one.result() for one in ended]
            finally:
                del self._aborted[request.request_id]
                left: set[asyncio.Future[Any]] = held if arriving is None else {arriving, *held}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    async def _hold(self, sample: Sample, started: float, aborted: asyncio.Event) -> Sample:
        """Wait for the time at which a slow engine would end the sample."""
        first = self._latency.time_to_first_token_s
        takes = first + max(0, len(sample.token_ids) - 1) * self._latency.seconds_per_token
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(started + takes - time.monotonic()):
                await aborted.wait()
        total = time.monotonic() - started
        return replace(sample, first_token_s=max(sample.first_token_s, min(first, total)), total_s=total)

    async def abort(self, request_ids: Sequence[str]) -> int:
        cut = await self._engine.abort(request_ids)
        for name in request_ids:
            if name in self._aborted:
                self._aborted[name].set()
        return cut
