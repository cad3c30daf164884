"""The pool of killable workers that a service shares between its runs.

Invariants: runs share the pool fairly; a job waits for a free place without a limit of its own and is timed
only while it runs; at most one worker of a place runs. A worker serves one run and one file of functions, and a worker
that ran user code never serves anything else, not even a file that changed; only code of the service itself shares
workers between runs. Code of users runs in the jail, but for what its run trusts. Each place keeps the workers of its
last few owners, so that owners that alternate cost no restarts.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from flotilla_core.logger import get_logger
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import NO_JAIL, Cell, Jail, no_jail, shown_for
from flotilla_workers.process import AnswerT, Failure, Timeout, WorkerProcess

MOST_OWNERS = 4
"""Workers that a place keeps; of those of users the one that was idle for longest ends for another owner's."""

log = get_logger(__name__)

PlaceT = TypeVar("PlaceT")


@dataclass(frozen=True)
class Owner:
    """The run and the file that a worker serves; both are empty for code of the service itself."""

    run_id: str = ""
    source: str = ""
    trusted: bool = False
    stamp: str = ""
    """State of the file."""

    @classmethod
    def of(cls, target: Target, run_id: str) -> Owner:
        if target.kind == "builtin":
            return BUILT_IN
        return cls(run_id, target.source, target.trusted, target.stamp)

    @property
    def jailed(self) -> bool:
        return self != BUILT_IN and not self.trusted

    def __str__(self) -> str:
        if self == BUILT_IN:
            return "built-in"
        source = f"trusted {self.source}" if self.trusted else self.source
        return f"{source} of run {self.run_id}" if self.run_id else source


BUILT_IN = Owner()


@dataclass(eq=False)
class _Place:
    """Room for one worker that runs, and for others that wait for their owners."""

    index: int
    workers: dict[Owner | None, WorkerProcess] = field(default_factory=dict)
    """The worker of each owner, the last used one last; the one of nobody has served nothing yet."""

    def suits(self, owner: Owner) -> int:
        """Rate the place for this owner: nothing is to be started, an unused worker is taken, or one must start."""
        return 2 if owner in self.workers else 1 if None in self.workers else 0


class WorkerPool(Generic[AnswerT]):
    """A fixed number of places for workers.

    They load by a function of the service, `package.module:function`. What such a worker says of a target's question is
    read by `read`, which raises `NoAnswer` where no honest worker says that: then the worker is killed. What runs code
    of users is in the jail that the pool is given.
    """

    def __init__(
        self,
        workers: int,
        loader: str,
        read: Callable[[Target, Any], AnswerT],
        find_jail: Callable[[], Jail] = no_jail,
    ) -> None:
        self._find_jail = find_jail
        self.jail = NO_JAIL
        """The jail of code of users, once the pool has started."""
        self._slots = itertools.count(64 * os.getpid())  # Other services of this host have others.
        self._places = [_Place(index) for index in range(workers)]
        self._loader = loader
        self._read = read
        self._share: FairShare[_Place] = FairShare()
        self.told: dict[str, str] = {}
        """The texts that workers told of targets that have loaded once, by their keys."""
        self.replaced = 0
        """Workers that were killed for what they did or died, since the start."""

    async def start(self) -> None:
        """Start a worker for every place, and look what jail this host has."""
        self.jail = await asyncio.to_thread(self._find_jail)
        async with asyncio.TaskGroup() as group:
            for place in self._places:
                group.create_task(self._start(place, None))
        for place in reversed(self._places):
            self._share.add(place)

    async def stop(self) -> None:
        """Kill every worker; jobs that still run fail."""
        for place in self._places:
            while place.workers:
                _, worker = place.workers.popitem()
                await worker.kill()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers that live, by what they are."""
        return {
            f"worker {place.index} ({owner or 'unused'})": worker.pid
            for place in self._places
            for owner, worker in place.workers.items()
            if worker.alive
        }

    @property
    def dead(self) -> int:
        """Workers that died, and whose owners have asked for nothing since."""
        return sum(not worker.alive for place in self._places for worker in place.workers.values())

    async def prove(self, target: Target, run_id: str = "") -> Failure | None:
        """Return why `target` does not load; one that has loaded once is proven."""
        if target.key in self.told:
            return None
        owner = Owner.of(target, run_id)
        if owner.jailed and self.jail.refusal:
            return Failure(self.jail.refusal)
        async with self._share.place(run_id, lambda place: place.suits(owner)) as place:
            worker = await self._worker_of(place, owner)
            failure = await worker.load(target)
        if failure is None:
            self.told[target.key] = worker.loaded[target.key]
        return failure

    async def ask(
        self, target: Target, question: Any, limit_s: float, run_id: str = ""
    ) -> tuple[AnswerT | Failure | Timeout, float]:
        """Return the outcome of a question, a JSON value, and the seconds that it took, waiting and loading aside."""
        owner = Owner.of(target, run_id)
        async with self._share.place(run_id, lambda place: place.suits(owner)) as place:
            worker = await self._worker_of(place, owner)
            failure = await worker.load(target)
            if failure is not None:
                return failure, 0.0
            started = asyncio.get_running_loop().time()
            outcome = await worker.ask(target, question, limit_s, partial(self._read, target))
            spent_s = asyncio.get_running_loop().time() - started
            if worker.spent:
                await place.workers.pop(owner).kill()
            return outcome, spent_s

    async def _worker_of(self, place: _Place, owner: Owner) -> WorkerProcess:
        # A worker that nobody owns yet is not in a jail.
        for key in (owner,) if owner.jailed and self.jail.level else (owner, None):
            worker = place.workers.pop(key, None)
            if worker is not None and worker.quiet:
                place.workers[owner] = worker
                return worker
            if worker is not None:
                self.replaced += 1
                spoke = "it wrote to its channel unasked; " if worker.alive else ""
                ended = spoke + await worker.kill()
                log.warning("worker replaced", worker=place.index, of=str(key or "nobody"), ended=ended)
        for former in [of for of in place.workers if of and replace(of, stamp=owner.stamp) == owner]:
            await place.workers.pop(former).kill()
        while len(place.workers) >= MOST_OWNERS:
            idle = next(of for of in place.workers if of != BUILT_IN)
            await place.workers.pop(idle).kill()
        return await self._start(place, owner)

    async def _start(self, place: _Place, owner: Owner | None) -> WorkerProcess:
        cell = Cell(NO_JAIL)
        if owner is not None and owner.jailed and self.jail.level:
            file = Path(owner.source)
            cell = Cell(self.jail, [shown_for(file)] if file.is_absolute() else (), next(self._slots))
        worker = await WorkerProcess.start(self._loader, cell)
        place.workers[owner] = worker
        return worker


class FairShare(Generic[PlaceT]):
    """The order in which runs get the next free place that they share.

    Invariants: while items of several runs wait, a run that has more places than another one that waits gets no further
    one. Of equals, the one that was served longest ago is next. Items of one run keep their order, and a run that is
    alone has all places. Nothing is free while a run waits. Of free places an item takes the one that suits it best,
    and of equals the one that was given back last: its caches are warm.
    """

    def __init__(self) -> None:
        self._free: list[PlaceT] = []
        self._working: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[PlaceT]]] = {}
        """The waiting items by run; the run that was served longest ago is first."""

    def add(self, place: PlaceT) -> None:
        """One place more, or one that is free again."""
        run_id = self._next()
        if run_id is None:
            self._free.append(place)
            return
        waiting = self._waiting.pop(run_id)
        self._working[run_id] += 1
        waiting.popleft().set_result(place)
        if waiting:
            self._waiting[run_id] = waiting

    @asynccontextmanager
    async def place(self, run_id: str, suits: Callable[[PlaceT], int] = lambda _: 0) -> AsyncIterator[PlaceT]:
        """One place for an item of a run, as long as the block lasts; waits for it.

        `suits` rates a free place for this item, where there is a choice.
        """
        place = await self._take(run_id, suits)
        try:
            yield place
        finally:
            self._give_back(run_id, place)

    async def _take(self, run_id: str, suits: Callable[[PlaceT], int]) -> PlaceT:
        if self._free:
            self._working[run_id] += 1
            return self._free.pop(max(reversed(range(len(self._free))), key=lambda at: suits(self._free[at])))
        promised: asyncio.Future[PlaceT] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, deque()).append(promised)
        try:
            return await promised
        except asyncio.CancelledError:
            if not promised.cancelled():  # it came in the moment in which the caller went away
                self._give_back(run_id, promised.result())
            raise

    def _give_back(self, run_id: str, place: PlaceT) -> None:
        self._working[run_id] -= 1
        if not self._working[run_id]:
            del self._working[run_id]
        self.add(place)

    def _next(self) -> str | None:
        for run_id, waiting in [*self._waiting.items()]:
            while waiting and waiting[0].done():  # its caller went away
                waiting.popleft()
            if not waiting:
                del self._waiting[run_id]
        return min(self._waiting, key=lambda run_id: self._working[run_id], default=None)
