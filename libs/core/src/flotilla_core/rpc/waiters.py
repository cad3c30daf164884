"""Callers that wait for a replica, served together: one timer and one look for all of them.

Invariants: who came first is asked first, and one who cannot be served yet holds up nobody; what was taken for a caller
who is cancelled in the same moment is given back; every wait ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from flotilla_core.errors import Unavailable

T = TypeVar("T")

NAME_THE_WAIT_AFTER_S = 10.0
# What a caller may take can depend on what nobody tells, so all of them are asked again.
LOOK_AGAIN_S = 0.25

logger = structlog.get_logger()


@dataclass(eq=False)
class _Waiter:
    """One caller, and what it gets in the end."""

    take: Callable[[], Any]
    what: str
    since: float
    taken: asyncio.Future[Any]
    named: bool = False


class Waiters:
    """Those of one pool; `standing` says how its replicas stand."""

    def __init__(self, standing: Callable[[], str]) -> None:
        self._standing = standing
        self._waiting: dict[_Waiter, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def wait(
        self,
        take: Callable[[], T | None],
        timeout_s: float,
        what: str,
        give_back: Callable[[T], None] = lambda taken: None,
    ) -> T:
        """What `take` gives, as soon as it gives anything."""
        taken = take()
        if taken is not None:
            return taken
        loop = asyncio.get_running_loop()
        waiter = _Waiter(take, what, loop.time(), loop.create_future())
        self._waiting[waiter] = None
        self._look_again_later()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._handed_over(waiter, give_back)
        except TimeoutError:
            raise Unavailable(
                f"waited {timeout_s:g} s for {what}", why=self._standing(), next_step="See flotilla ps."
            ) from None
        finally:
            del self._waiting[waiter]

    def look(self) -> None:
        """Something has changed: serve whoever can be served now."""
        for waiter in list(self._waiting):
            if waiter.taken.done():
                continue
            taken = waiter.take()
            if taken is not None:
                waiter.taken.set_result(taken)

    @staticmethod
    async def _handed_over(waiter: _Waiter, give_back: Callable[[T], None]) -> T:
        try:
            taken: T = await waiter.taken
            return taken
        except asyncio.CancelledError:
            if waiter.taken.done() and not waiter.taken.cancelled():
                give_back(waiter.taken.result())
            raise

    def _look_again_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.look()
        if self._waiting:
            self._name_the_longest_wait()
            self._look_again_later()

    def _name_the_longest_wait(self) -> None:
        longest = next(iter(self._waiting))
        waited_s = asyncio.get_running_loop().time() - longest.since
        if waited_s >= NAME_THE_WAIT_AFTER_S and not longest.named:
            longest.named = True
            logger.info("waiting", what=longest.what, callers=len(self._waiting), standing=self._standing())
