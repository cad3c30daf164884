"""The pool of killable workers that runs user code and checkers.

Invariants: runs that share the pool take turns; a job waits for a free worker without a limit of its own and is timed
only while it runs; a killed worker is replaced before the next job of its place; the pool never has more processes than
places.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from flotilla_core.errors import Internal, InvalidConfig
from flotilla_reward.job import Failure, Outcome, Sample, Target, Timeout, judge
from flotilla_reward.turns import Turns
from flotilla_reward.worker_process import WorkerDied, WorkerProcess

# Imports of a user's module or of math-verify; not counted as scoring.
LOAD_LIMIT_S = 60.0

log = structlog.get_logger(__name__)


@dataclass
class _Place:
    """Room for one worker."""

    index: int
    worker: WorkerProcess | None = None


class WorkerPool:
    """A fixed number of worker processes."""

    def __init__(self, workers: int) -> None:
        self._places = [_Place(index) for index in range(workers)]
        self._turns: Turns[_Place] = Turns()
        self._proven: set[str] = set()
        self.replaced = 0
        """Workers that were killed or died, since the start."""

    async def start(self) -> None:
        """Start every worker."""
        async with asyncio.TaskGroup() as group:
            for place in self._places:
                group.create_task(self._worker_of(place))
        for place in reversed(self._places):
            self._turns.add(place)

    async def stop(self) -> None:
        """Kill every worker; jobs that still run fail."""
        for place in self._places:
            if place.worker is not None:
                await place.worker.kill()
                place.worker = None

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that live, by place."""
        return {p.index: p.worker.pid for p in self._places if p.worker is not None and p.worker.alive}

    def has_proven(self, target: Target) -> bool:
        """Return whether it is known that `target` loads."""
        return target.key in self._proven

    async def require(self, target: Target, name: str, run_id: str = "") -> None:
        """Make sure that `target` loads; `InvalidConfig` says why it does not."""
        if self.has_proven(target):
            return
        async with self._turns.place(run_id) as place:
            failure = await self._load(await self._worker_of(place), target)
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
        async with self._turns.place(run_id) as place:
            worker = await self._worker_of(place)
            failure = await self._load(worker, target)
            if failure is not None:
                return failure, 0.0
            started = asyncio.get_running_loop().time()
            outcome = await self._run(worker, target, sample, limit_s)
            return outcome, asyncio.get_running_loop().time() - started

    async def _worker_of(self, place: _Place) -> WorkerProcess:
        if place.worker is not None and place.worker.alive:
            return place.worker
        if place.worker is not None:
            self.replaced += 1
            log.warning("reward worker replaced", worker=place.index, ended=await place.worker.kill())
            place.worker = None
        place.worker = await WorkerProcess.start()
        return place.worker

    async def _load(self, worker: WorkerProcess, target: Target) -> Failure | None:
        if worker.has_loaded(target):
            return None
        try:
            reply = await worker.load(target, LOAD_LIMIT_S)
        except TimeoutError:
            return Failure(f"did not finish loading within {LOAD_LIMIT_S:g} s")
        except WorkerDied as death:
            return Failure(f"the worker {death} while it loaded")
        return None if "loaded" in reply else _failure(reply)

    async def _run(self, worker: WorkerProcess, target: Target, sample: Sample, limit_s: float) -> Outcome:
        try:
            reply = await worker.score(target, sample._asdict(), limit_s)
        except TimeoutError:
            return Timeout(limit_s)
        except WorkerDied as death:
            return Failure(f"the worker {death} while it scored")
        return judge(reply["value"]) if "value" in reply else _failure(reply)


def _failure(reply: dict[str, object]) -> Failure:
    if "failed" not in reply:
        raise Internal("a reward worker sent neither a value nor a failure", why=f"{reply!r:.200}")
    return Failure(str(reply["failed"]), str(reply.get("traceback", "")))
