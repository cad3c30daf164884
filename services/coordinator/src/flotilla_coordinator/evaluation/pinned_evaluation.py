"""Evaluates a version on one pinned generator, while training continues on the others.

Invariants: at most one such evaluation is under way. The pinned replica takes no new weights until the evaluation has
ended; then it joins the next weight group like a late joiner. Where fewer than two generators serve the version, none
is pinned. An evaluation whose replica was lost, or became the last one of training, gives no result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from flotilla_coordinator.evaluation.evaluate import Evaluation, Evaluator
from flotilla_coordinator.weights.members import GeneratorReplica
from flotilla_core.errors import DeadlineExceeded, Exhausted, Unavailable
from flotilla_core.version import Version

LOST = (Unavailable, DeadlineExceeded, Exhausted)


@dataclass(frozen=True)
class _UnderWay:
    """The evaluation that is under way, and its replica."""

    step: int
    version: Version
    instance_id: str
    task: asyncio.Task[Evaluation]


@dataclass(frozen=True)
class PinnedResult:
    """The result of an evaluation that began after `step` steps; None where its replica was lost."""

    step: int
    version: Version
    evaluation: Evaluation | None


class PinnedEvaluation:
    """Keeps one replica on a version while it evaluates that version."""

    def __init__(
        self,
        evaluator: Evaluator,
        ready: Callable[[], list[GeneratorReplica]],
        serves: Callable[[str, Version], bool],
    ) -> None:
        self._evaluator = evaluator
        self._ready = ready
        self._serves = serves
        self._under_way: _UnderWay | None = None

    @property
    def begun(self) -> bool:
        """Return whether an evaluation was begun whose result was not fetched yet."""
        return self._under_way is not None

    @property
    def awaited_step(self) -> int | None:
        """The steps done at the evaluation whose result was not fetched yet."""
        return None if self._under_way is None else self._under_way.step

    @property
    def ended(self) -> bool:
        """Return whether the result is available."""
        return self._under_way is not None and self._under_way.task.done()

    def begin(self, version: Version, step: int) -> bool:
        """Pin the least loaded replica that serves `version`; return False where none can be spared."""
        serving = [replica for replica in self._ready() if self._serves(replica.instance_id, version)]
        if len(serving) < 2:
            return False
        chosen = min(serving, key=lambda replica: replica.outstanding).instance_id
        task = asyncio.create_task(self._evaluator.evaluate(version, step, on=chosen))
        self._under_way = _UnderWay(step, version, chosen, task)
        return True

    def spared(self, replicas: list[GeneratorReplica]) -> list[GeneratorReplica]:
        """Return the replicas that take new weights: all but the pinned one, unless it is the last."""
        pinned = self._under_way
        if pinned is None or pinned.task.done():
            return replicas
        others = [replica for replica in replicas if replica.instance_id != pinned.instance_id]
        if not others:
            pinned.task.cancel()
        return others or replicas

    def let_go(self, instance_id: str) -> None:
        """Give up the evaluation if the pinned replica must serve another run."""
        if self._under_way is not None and self._under_way.instance_id == instance_id:
            self._under_way.task.cancel()

    async def result(self) -> PinnedResult:
        """Wait for the end of the evaluation, and return its result."""
        pinned = self._under_way
        assert pinned is not None, "only asked for what was begun"
        try:
            await asyncio.wait({pinned.task})
        finally:
            self._under_way = None
            pinned.task.cancel()
        if pinned.task.cancelled() or isinstance(pinned.task.exception(), LOST):
            return PinnedResult(pinned.step, pinned.version, None)
        return PinnedResult(pinned.step, pinned.version, pinned.task.result())

    async def close(self) -> None:
        """Give up the evaluation that is under way."""
        if self._under_way is not None:
            self._under_way.task.cancel()
            await asyncio.gather(self._under_way.task, return_exceptions=True)
            self._under_way = None
