"""Groups that ask for scores at nearly the same time share one call.

Invariants: nobody waits longer than a moment for company, and nobody for the samples of another group; a sample id
is in a call once; a call that fails fails for everybody who still waits, and one that nobody waits for any more ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from opentelemetry import trace
from opentelemetry.trace import SpanContext

from flotilla.reward.v1 import reward_pb2 as pb

GATHER_S = 0.005
"""A call costs both sides about a millisecond, so that many small ones cost more than this wait."""
GATHER_BUSY_S = 0.025
"""While other calls are under way: the more samples end, the more of them share a call."""

T = TypeVar("T")
Take = Callable[[str, T], None]
Call = Callable[[list[pb.ScoreItem], list[SpanContext], Take[T]], Awaitable[None]]
"""Scores items on behalf of some spans, and hands on each outcome by its sample id as it comes."""


class _Asked(Generic[T]):
    """One group that waits."""

    def __init__(self, items: list[pb.ScoreItem]) -> None:
        self.items = {item.sample_id: item for item in items}
        self.outcomes: dict[str, T] = {}
        self.done: asyncio.Future[dict[str, T]] = asyncio.get_running_loop().create_future()
        self.span = trace.get_current_span().get_span_context()

    def take(self, sample_id: str, outcome: T) -> None:
        """The outcome of one item; the group goes on with the last."""
        self.outcomes[sample_id] = outcome
        if len(self.outcomes) == len(self.items) and not self.done.done():
            self.done.set_result(self.outcomes)


class ScoreGathering(Generic[T]):
    """Joins what is asked for within a moment."""

    def __init__(self, call: Call[T]) -> None:
        self._call = call
        self._waiting: list[_Asked[T]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def outcomes(self, items: list[pb.ScoreItem]) -> dict[str, T]:
        """One outcome for every item."""
        if not items:
            return {}
        asked: _Asked[T] = _Asked(items)
        if not self._waiting:
            wait_s = GATHER_BUSY_S if self._calls else GATHER_S
            asyncio.get_running_loop().call_later(wait_s, self._send)
        self._waiting.append(asked)
        return await asked.done

    def _send(self) -> None:
        together: dict[str, _Asked[T]] = {}
        for asked in self._waiting:
            if together.keys() & asked.items.keys():
                self._begin(together)
                together = {}
            together |= dict.fromkeys(asked.items, asked)
        self._waiting = []
        self._begin(together)

    def _begin(self, together: dict[str, _Asked[T]]) -> None:
        groups = list(dict.fromkeys(together.values()))
        call = asyncio.create_task(self._answer(groups, together), name="score")
        self._calls.add(call)

        def ended(call: asyncio.Task[None]) -> None:
            self._calls.discard(call)
            error = None if call.cancelled() else call.exception()
            for asked in groups:
                if error is not None and not asked.done.done():
                    asked.done.set_exception(error)

        def gone(_: asyncio.Future[dict[str, T]]) -> None:
            # A call that served everybody ends by itself, and well.
            if all(asked.done.done() for asked in groups) and any(asked.done.cancelled() for asked in groups):
                call.cancel()

        call.add_done_callback(ended)
        for asked in groups:
            asked.done.add_done_callback(gone)

    async def _answer(self, groups: list[_Asked[T]], together: dict[str, _Asked[T]]) -> None:
        items = [item for asked in groups for item in asked.items.values()]
        await self._call(
            items,
            [asked.span for asked in groups],
            lambda sample_id, outcome: together[sample_id].take(sample_id, outcome),
        )
