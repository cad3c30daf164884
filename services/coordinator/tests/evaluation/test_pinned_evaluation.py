"""An evaluation beside the training: it has one generator for itself, and never costs the training its last one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from flotilla_coordinator.evaluation.evaluate import Evaluation
from flotilla_coordinator.evaluation.pinned_evaluation import PinnedEvaluation, PinnedResult
from flotilla_core.errors import FlotillaError, Unavailable, UserCodeError
from flotilla_core.version import Version

V1, V2 = Version(0, 1), Version(0, 2)
WAIT_S = 5.0


@dataclass(eq=False)
class Replica:
    instance_id: str
    outstanding: int = 0


class Evaluator:
    """Ends when a test says how."""

    def __init__(self) -> None:
        self.asked: list[tuple[Version, int, str]] = []
        self.end: asyncio.Future[Evaluation] = asyncio.get_running_loop().create_future()

    async def evaluate(self, version: Version, step: int, on: str = "") -> Evaluation:
        self.asked.append((version, step, on))
        return await self.end


class Bench:
    """Three replicas, of which some serve the version."""

    def __init__(self, *serving: str) -> None:
        self.replicas = [Replica("a", 10), Replica("b", 5), Replica("c", 7)]
        self.evaluator = Evaluator()
        ready: Any = lambda: self.replicas  # noqa: E731
        evaluator: Any = self.evaluator
        self.pinned = PinnedEvaluation(evaluator, ready, lambda name, _: name in serving)

    def spared(self, *names: str) -> list[str]:
        replicas: Any = [replica for replica in self.replicas if replica.instance_id in names]
        return [replica.instance_id for replica in self.pinned.spared(replicas)]

    async def result(self) -> PinnedResult:
        return await asyncio.wait_for(self.pinned.result(), WAIT_S)


async def test_the_idlest_replica_that_serves_the_version_is_asked_and_takes_no_weights_meanwhile() -> None:
    bench = Bench("a", "c")
    assert bench.spared("a", "b", "c") == ["a", "b", "c"]
    assert bench.pinned.begin(V1, 4) and bench.pinned.begun and not bench.pinned.ended
    await asyncio.sleep(0)
    assert bench.evaluator.asked == [(V1, 4, "c")] and bench.spared("a", "b", "c") == ["a", "b"]
    bench.evaluator.end.set_result(Evaluation(0.75))
    await asyncio.sleep(0)
    assert bench.pinned.ended and bench.spared("a", "b", "c") == ["a", "b", "c"]
    assert await bench.result() == PinnedResult(4, V1, Evaluation(0.75)) and not bench.pinned.begun


async def test_the_only_generator_of_a_version_is_not_spared() -> None:
    bench = Bench("b")
    assert not bench.pinned.begin(V1, 4) and not bench.pinned.begun


async def test_an_evaluation_whose_replica_is_the_last_one_gives_it_back() -> None:
    bench = Bench("a", "b")
    assert bench.pinned.begin(V1, 4)
    assert bench.spared("b") == ["b"]
    assert await bench.result() == PinnedResult(4, V1, None)


@pytest.mark.parametrize(
    ("error", "lost"), [(Unavailable("generator-1 is gone"), True), (UserCodeError("no score"), False)]
)
async def test_a_lost_replica_costs_the_result_and_a_broken_reward_the_run(
    error: FlotillaError, lost: bool
) -> None:
    bench = Bench("a", "b")
    assert bench.pinned.begin(V1, 4)
    bench.evaluator.end.set_exception(error)
    if lost:
        assert await bench.result() == PinnedResult(4, V1, None)
    else:
        with pytest.raises(UserCodeError, match="no score"):
            await bench.result()
    assert bench.pinned.begin(V2, 8) and bench.pinned.begun
    await bench.pinned.close()


async def test_closing_gives_up_what_is_under_way() -> None:
    bench = Bench("a", "b")
    await bench.pinned.close()
    assert bench.pinned.begin(V1, 4)
    await asyncio.sleep(0)
    await bench.pinned.close()
    assert not bench.pinned.begun and bench.evaluator.end.cancelled()


async def test_an_evaluation_whose_replica_goes_to_another_run_gives_no_result() -> None:
    bench = Bench("a", "c")
    assert bench.pinned.begin(V1, 4)
    asked = asyncio.create_task(bench.result())
    await asyncio.sleep(0)
    bench.pinned.let_go("a")
    assert not bench.pinned.ended
    bench.pinned.let_go("c")
    assert (await asked).evaluation is None and not bench.pinned.begun
