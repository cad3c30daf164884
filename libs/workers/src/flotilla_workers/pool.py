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
import math
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from flotilla_core.logger import get_logger
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import NO_JAIL, Cell, Jail, no_jail, shown_for
from flotilla_workers.process import AnswerT, Failure, Timeout, WorkerProcess
from flotilla_workers.zygotes import Zygotes, that_forks

MOST_OWNERS = 4
"""Workers that a place keeps; of those of users the one that was idle for longest ends for another owner's."""

TOGETHER_S, MOST_ASKED_TOGETHER = 0.02, 16
"""The time that questions of one run may take which a worker of ours is asked together, and their greatest number."""

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
STOPPED = Failure("its workers are being ended")


@dataclass(eq=False)
class _Place:
    """Room for one worker that runs, and for others that wait for their owners."""

    index: int
    workers: dict[Owner | None, WorkerProcess] = field(default_factory=dict)
    """The worker of each owner, the last used one last; the one of nobody has served nothing yet."""
    ending: asyncio.Task[str] | None = None
    """The end of a worker that gave way."""

    def suits(self, owner: Owner) -> int:
        """Rate the place for this owner: nothing is to be started, an unused worker is taken, or one must start."""
        return 2 if owner in self.workers else 1 if None in self.workers else 0


@dataclass(eq=False)
class _Asked(Generic[AnswerT]):
    """A question to our own code, and whoever waits for its outcome."""

    question: Any
    outcome: asyncio.Future[tuple[AnswerT | Failure | Timeout, float]]

    def tell(self, outcome: tuple[AnswerT | Failure | Timeout, float]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class _Queue(Generic[AnswerT]):
    """The questions of one run to one target of our own code."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.waiting: deque[_Asked[AnswerT]] = deque()
        self.places = 0
        """The places that serve it."""
        self.slowest_s = math.inf
        """The longest time of a question among those that were asked together last."""

    def drop_gone(self) -> bool:
        """Forget those for whom nobody waits; return whether any is left."""
        while self.waiting and self.waiting[0].outcome.done():
            self.waiting.popleft()
        return bool(self.waiting)

    def take(self, places: int) -> list[_Asked[AnswerT]]:
        """Return the questions that a worker is asked together: several where they are short and all answered soon."""
        fast = int(TOGETHER_S / max(self.slowest_s, TOGETHER_S / MOST_ASKED_TOGETHER))
        most = max(1, min(fast, len(self.waiting) // places))
        taken: list[_Asked[AnswerT]] = []
        while self.drop_gone() and len(taken) < most:
            taken.append(self.waiting.popleft())
        return taken

    def fail_with(self, serving: asyncio.Task[None]) -> None:
        """Tell of an error of a place: the one who waits longest, or all where no other place serves them."""
        error = None if serving.cancelled() else serving.exception()
        while error is not None and self.drop_gone():
            self.waiting.popleft().outcome.set_exception(error)
            if self.places:
                return


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
        self._zygotes = Zygotes()
        self._places = [_Place(index) for index in range(workers)]
        self._queues: dict[tuple[str, int, float], _Queue[AnswerT]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._stopped = False
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
        self.jail = await that_forks(self.jail)
        async with asyncio.TaskGroup() as group:
            for place in self._places:
                group.create_task(self._start(place, None))
        for place in reversed(self._places):
            self._share.add(place)

    async def stop(self) -> None:
        """Kill every worker; jobs that still run or wait fail."""
        self._stopped = True
        for place in self._places:
            while place.workers:
                _, worker = place.workers.popitem()
                await worker.kill()
            if place.ending is not None:
                await place.ending
        await self._zygotes.stop()

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
            worker = await self._loaded(place, owner, target)
        if isinstance(worker, Failure):
            return worker
        self.told[target.key] = worker.loaded[target.key]
        return None

    async def ask(
        self, target: Target, question: Any, limit_s: float, run_id: str = "", *, alone: bool = False
    ) -> tuple[AnswerT | Failure | Timeout, float]:
        """Return the outcome of a question, a JSON value, and the seconds that it took, waiting and loading aside.

        `alone` says that code of ours is not asked together with other questions: it starts programs of others.
        """
        owner = Owner.of(target, run_id)
        if owner == BUILT_IN and not alone:
            return await self._ask_with_others(target, question, limit_s, run_id)
        async with self._share.place(run_id, lambda place: place.suits(owner)) as place:
            worker = await self._loaded(place, owner, target)
            if isinstance(worker, Failure):
                return worker, 0.0
            started = asyncio.get_running_loop().time()
            outcome = await worker.ask(target, question, limit_s, partial(self._read, target))
            spent_s = asyncio.get_running_loop().time() - started
            if worker.spent:
                await self._give_way(place, owner)
            return outcome, spent_s

    async def _ask_with_others(
        self, target: Target, question: Any, limit_s: float, run_id: str
    ) -> tuple[AnswerT | Failure | Timeout, float]:
        """Ask our own code, together with what else the run asks it now."""
        key = run_id, id(target), limit_s
        queue = self._queues.setdefault(key, _Queue(target))
        asked = _Asked(question, asyncio.get_running_loop().create_future())
        queue.waiting.append(asked)
        if queue.places < len(self._places):
            queue.places += 1
            serving = asyncio.create_task(self._serve(key, queue))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
            serving.add_done_callback(queue.fail_with)
        return await asked.outcome

    async def _serve(self, key: tuple[str, int, float], queue: _Queue[AnswerT]) -> None:
        """Have one place after the other answer what waits in a queue."""
        run_id, _, limit_s = key
        try:
            while queue.drop_gone():
                async with self._share.place(run_id, lambda place: place.suits(BUILT_IN)) as place:
                    worker = await self._loaded(place, BUILT_IN, queue.target)
                    asked = queue.take(len(self._places))
                    if isinstance(worker, Failure):
                        for one in asked:
                            one.tell((worker, 0.0))
                    elif asked:
                        await self._ask_all(worker, queue, asked, limit_s)
        finally:
            queue.places -= 1
            if not queue.places:
                self._queues.pop(key, None)

    async def _ask_all(
        self, worker: WorkerProcess, queue: _Queue[AnswerT], asked: Sequence[_Asked[AnswerT]], limit_s: float
    ) -> None:
        left = deque(asked)
        slowest_s = 0.0

        def take(outcome: AnswerT | Failure | Timeout, spent_s: float) -> None:
            nonlocal slowest_s
            slowest_s = max(slowest_s, spent_s)
            left.popleft().tell((outcome, spent_s))

        questions = [one.question for one in asked]
        read = partial(self._read, queue.target)
        asking = asyncio.ensure_future(worker.ask_all(queue.target, questions, limit_s, read, take))

        def stop_for_nobody(_: object) -> None:
            if left and all(one.outcome.cancelled() for one in left):
                asking.cancel()

        for one in asked:
            one.outcome.add_done_callback(stop_for_nobody)
        await asyncio.wait([asking])
        queue.slowest_s = slowest_s
        queue.waiting.extendleft(reversed(left))
        if not asking.cancelled():
            asking.result()

    async def _loaded(self, place: _Place, owner: Owner, target: Target) -> WorkerProcess | Failure:
        """Return the worker of an owner with the target, or why there is none."""
        if self._stopped:
            return STOPPED
        worker = await self._worker_of(place, owner)
        return await worker.load(target) or worker

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
            await self._give_way(place, former)
        while len(place.workers) >= MOST_OWNERS:
            await self._give_way(place, next(of for of in place.workers if of != BUILT_IN))
        return await self._start(place, owner)

    async def _give_way(self, place: _Place, of: Owner | None) -> None:
        """End a worker while another one starts; of each place one at a time."""
        worker = place.workers.pop(of)
        if place.ending is not None:
            await place.ending
        place.ending = asyncio.create_task(worker.kill())

    async def _start(self, place: _Place, owner: Owner | None) -> WorkerProcess:
        if owner is None or not owner.jailed or not self.jail.level:
            worker = await WorkerProcess.start(self._loader, Cell(NO_JAIL))
        else:
            file = Path(owner.source)
            functions = [shown_for(file)] if file.is_absolute() else []
            worker = await self._zygotes.worker(self.jail, self._loader, functions, self._slots)
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
