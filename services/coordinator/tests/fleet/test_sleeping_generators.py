"""Generators that sleep during updates: who is asked, and what a refusal costs."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla_coordinator.fleet.run_fleet import SleepingGenerators
from flotilla_core.errors import DeadlineExceeded, Exhausted, FlotillaError
from flotilla_testing.scripted import ScriptedReplica, scripted_generator

pytestmark = pytest.mark.usefixtures("direct_calls")


class Bench:
    """The turns of a run with two generators."""

    def __init__(self) -> None:
        self.replicas = [scripted_generator("a"), scripted_generator("b")]
        self.left: list[tuple[str, FlotillaError]] = []
        self.warnings: list[str] = []
        self.sleeping = SleepingGenerators("run", self._ready, self._let_go, self.warnings.append)

    def _ready(self) -> list[Any]:
        return list(self.replicas)

    def _let_go(self, replica: Any, error: FlotillaError) -> None:
        self.left.append((replica.name, error))

    def calls(self, replica: ScriptedReplica) -> list[str]:
        return [method for method, _ in replica.stub.calls]


async def test_all_generators_sleep_for_the_run_and_all_wake() -> None:
    bench = Bench()
    await bench.sleeping.put_to_sleep()
    assert bench.sleeping.sleeps("a-1") and bench.sleeping.sleeps("b-1") and not bench.sleeping.sleeps("c-1")
    await bench.sleeping.wake()
    assert not bench.sleeping.sleeps("a-1") and not bench.left and not bench.warnings
    for replica in bench.replicas:
        assert bench.calls(replica) == ["Sleep", "Wake"]
        assert [request.run_id for _, request in replica.stub.calls] == ["run", "run"]


async def test_one_that_stays_awake_is_named_and_woken_all_the_same() -> None:
    bench = Bench()
    bench.replicas[1].stub.failures["Sleep"] = [DeadlineExceeded("a sample still runs")]
    await bench.sleeping.put_to_sleep()
    (warning,) = bench.warnings
    assert warning.startswith("b keeps the memory") and "a sample still runs" in warning
    assert bench.sleeping.sleeps("a-1") and not bench.sleeping.sleeps("b-1")
    await bench.sleeping.wake()
    assert bench.calls(bench.replicas[1]) == ["Sleep", "Wake"], (
        "it may have fallen asleep after its answer was lost"
    )


async def test_one_that_does_not_wake_gets_no_work_and_the_others_go_on() -> None:
    bench = Bench()
    bench.replicas[0].stub.failures["Wake"] = [Exhausted("the GPU has no room")]
    await bench.sleeping.put_to_sleep()
    await bench.sleeping.wake()
    assert [name for name, _ in bench.left] == ["a"] and isinstance(bench.left[0][1], Exhausted)
    assert not bench.sleeping.sleeps("b-1")


async def test_one_that_came_meanwhile_is_awake_and_is_not_asked() -> None:
    bench = Bench()
    await bench.sleeping.put_to_sleep()
    bench.replicas.append(scripted_generator("c"))
    await bench.sleeping.wake()
    assert not bench.replicas[-1].stub.calls
