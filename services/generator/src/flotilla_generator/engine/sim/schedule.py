"""The schedule of the simulated engine: which samples decode, which wait for a place, and when each one ends.

Invariants: never more samples decode than there are places, and those that wait get theirs in the order in which they
came; a sample ends once: in its time, or at once when it is cut; one timer serves all of them, set to the next end.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from itertools import count

from flotilla_generator.engine.sim.decoding import Decoding

Ended = Callable[[Decoding], None]


class Schedule:
    """The places of one engine."""

    def __init__(self, places: int, begin: Callable[[Decoding], None]) -> None:
        """`begin` is called for each sample that decodes from now on."""
        self._free = places
        self._begin = begin
        self._waiting: dict[Decoding, Ended] = {}
        self._running: dict[Decoding, Ended] = {}
        self._ends: list[tuple[float, int, Decoding]] = []
        """The ends by time; those of samples that were cut are passed by when their time comes."""
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self.beginning = True
        """False lets no sample begin, whatever place is free."""
        self.ending = True
        """False lets no sample end in its time."""
        self._still_since: float | None = None
        """The time from which on nothing decodes; empty while it does."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Samples that have no place yet."""
        return max(0, len(self._waiting) - self._free)

    async def wait_idle(self) -> None:
        """Wait until none decodes."""
        await self._idle.wait()

    def ask(self, samples: Iterable[Decoding], ended: Ended) -> None:
        """Let samples decode as soon as there are places; `ended` is called for each one."""
        self._waiting.update(dict.fromkeys(samples, ended))
        self.look()

    def cut(self, samples: Iterable[Decoding]) -> int:
        """End samples now; how many of them had not ended."""
        known = [one for one in samples if one in self._running or one in self._waiting]
        for one in known:
            one.cut = True
            self._remove(one)(one)
        self.look()
        return len(known)

    def forget(self, samples: Iterable[Decoding]) -> None:
        """Remove samples that no caller wants any more."""
        for one in samples:
            if one in self._running or one in self._waiting:
                self._remove(one)
        self.look()

    def stand_still(self) -> None:
        """Let no sample decode until `go_on`."""
        self.beginning = self.ending = False
        if self._still_since is None:
            self._still_since = asyncio.get_running_loop().time()

    def go_on(self) -> None:
        """Let all samples decode again; the time in between is added to their ends."""
        if self._still_since is not None:
            still_s, self._still_since = asyncio.get_running_loop().time() - self._still_since, None
            self._ends = [(end + still_s, number, one) for end, number, one in self._ends]
            for one in self._running:
                one.started += still_s
        self.beginning = self.ending = True
        self.look()

    def look(self) -> None:
        """Let begin and end what can; to be called after `beginning` or `ending` was switched on."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self.ending and self._ends and self._ends[0][0] <= now:
            _, _, one = heapq.heappop(self._ends)
            if one in self._running:
                self._remove(one)(one)
        while self.beginning and self._free and self._waiting:
            one = next(iter(self._waiting))
            self._free -= 1
            self._running[one] = self._waiting.pop(one)
            self._idle.clear()
            self._begin(one)
            heapq.heappush(self._ends, (now + one.seconds, next(self._numbers), one))
        self._set_timer(loop)

    def _remove(self, one: Decoding) -> Ended:
        if one in self._waiting:
            return self._waiting.pop(one)
        self._free += 1
        ended = self._running.pop(one)
        if not self._running:
            self._idle.set()
        return ended

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        due = self._ends[0][0] if self._ends and self.ending else None
        if self._timer is not None:
            if self._timer.when() == due and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = loop.call_at(due, self._due)

    def _due(self) -> None:
        self._timer = None
        self.look()
