"""Callers that wait for a replica, served together: one timer and one look for all of them.

Invariants: the lowest priority is asked first, and who came first among equals; one who cannot be served yet holds up
nobody; what was taken for a caller who is cancelled in the same moment is given back; a wait gives up when nobody can
serve it and nobody could when its patience was looked at last.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from flotilla_core.errors import Unavailable

T = TypeVar("T")

NAME_THE_WAIT_AFTER_S = 10.0
# What a caller may take can depend on what nobody tells, so all of them are asked again.
LOOK_AGAIN_S = 0.25

logger = structlog.get_logger()


@dataclass(frozen=True)
class Wish(Generic[T]):
    """What a caller waits for."""

    take: Callable[[], T | None]
    """It, as soon as it is there."""
    what: str
    """In words."""
    patience_s: float
    within_reach: Callable[[], bool] = lambda: False
    """Whether it only has to wait for its turn: then patience is not used up."""
    give_back: Callable[[T], None] = lambda taken: None
    priority: int = 0
    """Lower ones come first."""


@dataclass(order=True)
class _Waiter:
    """One caller, and what it gets in the end."""

    priority: int
    number: int
    wish: Wish[Any] = field(compare=False)
    since: float = field(compare=False)
    gives_up_at: float = field(compare=False)
    reachable: bool = field(compare=False)
    """Whether somebody could have served it when that was looked at last."""
    taken: asyncio.Future[Any] = field(compare=False)
    named: bool = field(default=False, compare=False)


class Waiters:
    """Those of one pool; `standing` says how its replicas stand, `room` whether any of them could take anything.

    `on_wait` is told of a wait that has become long, and until when it may last.
    """

    def __init__(
        self, standing: Callable[[], str], room: Callable[[], bool], on_wait: Callable[[str], None]
    ) -> None:
        self._standing = standing
        self._room = room
        self._on_wait = on_wait
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, wish: Wish[T]) -> T:
        """What `wish.take` gives, as soon as it gives anything."""
        # Whoever waits already was asked at the last change: what is left now is nobody else's.
        taken = wish.take()
        if taken is not None:
            return taken
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiter = _Waiter(
            wish.priority,
            next(self._numbers),
            wish,
            since=now,
            gives_up_at=now + wish.patience_s,
            reachable=wish.within_reach(),
            taken=loop.create_future(),
        )
        bisect.insort(self._waiting, waiter)
        self._look_again_later()
        try:
            handed_over: T = await self._handed_over(waiter)
            return handed_over
        finally:
            self._remove(waiter)

    def look(self) -> None:
        """Something has changed: serve whoever can be served now."""
        if not self._waiting or not self._room():
            return
        for waiter in self._waiting:
            if waiter.taken.done():
                continue
            taken = waiter.wish.take()
            if taken is not None:
                waiter.taken.set_result(taken)
                if not self._room():
                    return

    @staticmethod
    async def _handed_over(waiter: _Waiter) -> Any:
        try:
            return await waiter.taken
        except asyncio.CancelledError:
            taken = waiter.taken
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                waiter.wish.give_back(taken.result())
            raise

    def _remove(self, waiter: _Waiter) -> None:
        del self._waiting[bisect.bisect_left(self._waiting, waiter)]

    def _look_again_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.look()
        now = asyncio.get_running_loop().time()
        for waiter in self._waiting:
            if now >= waiter.gives_up_at and not waiter.taken.done():
                self._end_or_extend(waiter, now)
        if self._waiting:
            self._name_the_longest_wait(now)
            self._look_again_later()

    def _end_or_extend(self, waiter: _Waiter, now: float) -> None:
        wish, was_reachable = waiter.wish, waiter.reachable
        waiter.reachable = wish.within_reach()
        if waiter.reachable or was_reachable:
            waiter.gives_up_at = now + wish.patience_s
            return
        waiter.taken.set_exception(
            Unavailable(
                f"waited {wish.patience_s:g} s for {wish.what}",
                why=self._standing(),
                next_step="See flotilla ps.",
            )
        )

    def _name_the_longest_wait(self, now: float) -> None:
        """Where it is not only waiting for its turn."""
        longest = min(self._waiting, key=lambda waiter: waiter.since)
        late = now - longest.since >= NAME_THE_WAIT_AFTER_S
        if late and not longest.named and not longest.wish.within_reach():
            longest.named = True
            what, standing = longest.wish.what, self._standing()
            logger.info("waiting", what=what, callers=len(self._waiting), standing=standing)
            left = longest.gives_up_at - now
            self._on_wait(f"waiting for {what}, for at most {left:.0f} s more: {standing}")
