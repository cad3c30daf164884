"""The pool of killable workers that runs user code and checkers.

Invariants: runs share the pool fairly; a job waits for a free place without a limit of its own and is timed
only while it runs; at most one worker of a place runs. A worker serves one run and one file of functions, and a worker
that ran user code never serves anything else; only built-in rewards share workers between runs. Each place keeps the
workers of its last few owners, so that owners that alternate cost no restarts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from flotilla_core.errors import InvalidConfig
from flotilla_core.logger import get_logger
from flotilla_reward.fair_share import FairShare
from flotilla_reward.job import Failure, Outcome, Sample, Target, Timeout
from flotilla_reward.worker_process import WorkerDied, WorkerProcess

# Imports of a user's module or of math-verify; not counted as scoring.
LOAD_LIMIT_S = 60.0
MOST_OWNERS = 4
"""Workers that a place keeps; of those of users the one that was idle for longest ends for another owner's."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Owner:
    """The run and the file that a worker serves; both are empty for built-in rewards."""

    run_id: str = ""
    source: str = ""

    @classmethod
    def of(cls, target: Target, run_id: str) -> Owner:
        return BUILT_IN if target.kind == "builtin" else cls(run_id, target.source)

    def __str__(self) -> str:
        if self == BUILT_IN:
            return "built-in rewards"
        return f"{self.source} of run {self.run_id}" if self.run_id else self.source


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


class WorkerPool:
    """A fixed number of places for workers."""

    def __init__(self, workers: int) -> None:
        self._places = [_Place(index) for index in range(workers)]
        self._share: FairShare[_Place] = FairShare()
        self._proven: set[str] = set()
        self.replaced = 0
        """Workers that were killed for what they did or died, since the start."""

    async def start(self) -> None:
        """Start a worker for every place."""
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

    def has_proven(self, target: Target) -> bool:
        """Return whether it is known that `target` loads."""
        return target.key in self._proven

    async def require(self, target: Target, name: str, run_id: str = "") -> None:
        """Make sure that `target` loads; `InvalidConfig` says why it does not."""
        if self.has_proven(target):
            return
        owner = Owner.of(target, run_id)
        async with self._share.place(run_id, lambda place: place.suits(owner)) as place:
            failure = await self._load(await self._worker_of(place, owner), target)
        if failure is None:
            self._proven.add(target.key)
        else:
            raise InvalidConfig(
                f"reward {name} cannot be loaded",
                where=target.source,
                why=failure.message + (f"\n{failure.traceback}" if failure.traceback else ""),
            )

    async def score(
        self, target: Target, sample: Sample, limit_s: float, run_id: str = ""
    ) -> tuple[Outcome, float]:
        """Return the outcome and the seconds that scoring took, waiting and loading aside."""
        owner = Owner.of(target, run_id)
        async with self._share.place(run_id, lambda place: place.suits(owner)) as place:
            worker = await self._worker_of(place, owner)
            failure = await self._load(worker, target)
            if failure is not None:
                return failure, 0.0
            started = asyncio.get_running_loop().time()
            outcome = await self._run(worker, target, sample, limit_s)
            return outcome, asyncio.get_running_loop().time() - started

    async def _worker_of(self, place: _Place, owner: Owner) -> WorkerProcess:
        for key in (owner, None):
            worker = place.workers.pop(key, None)
            if worker is not None and worker.quiet:
                place.workers[owner] = worker
                return worker
            if worker is not None:
                self.replaced += 1
                spoke = "it wrote to its channel unasked; " if worker.alive else ""
                ended = spoke + await worker.kill()
                log.warning(
                    "reward worker replaced", worker=place.index, of=str(key or "nobody"), ended=ended
                )
        while len(place.workers) >= MOST_OWNERS:
            idle = next(of for of in place.workers if of != BUILT_IN)
            await place.workers.pop(idle).kill()
        return await self._start(place, owner)

    async def _start(self, place: _Place, owner: Owner | None) -> WorkerProcess:
        worker = await WorkerProcess.start()
        place.workers[owner] = worker
        return worker

    async def _load(self, worker: WorkerProcess, target: Target) -> Failure | None:
        try:
            return await worker.load(target, LOAD_LIMIT_S)
        except TimeoutError:
            return Failure(f"did not finish loading within {LOAD_LIMIT_S:g} s")
        except WorkerDied as death:
            return Failure(death.while_it("loaded"))

    async def _run(self, worker: WorkerProcess, target: Target, sample: Sample, limit_s: float) -> Outcome:
        try:
            return await worker.score(target, sample, limit_s)
        except TimeoutError:
            return Timeout(limit_s)
        except WorkerDied as death:
            return Failure(death.while_it("scored"))
