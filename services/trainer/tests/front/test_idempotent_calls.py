"""Requests that are sent twice act once."""

from __future__ import annotations

import asyncio

import pytest

from flotilla_trainer.front.idempotent_calls import IdempotentCalls


class Counter:
    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate
        self.runs = 0

    async def work(self) -> int:
        self.runs += 1
        await self.gate.wait()
        return self.runs


async def test_a_repeat_waits_for_the_first_and_gets_its_result() -> None:
    gate = asyncio.Event()
    counter, once = Counter(gate), IdempotentCalls[int](8)
    first, second = (asyncio.create_task(once.run("k", counter.work)) for _ in range(2))
    gate.set()
    assert await asyncio.gather(first, second, once.run("k", counter.work)) == [1, 1, 1]


async def test_work_goes_on_when_its_caller_goes_away() -> None:
    gate = asyncio.Event()
    counter, once = Counter(gate), IdempotentCalls[int](8)
    caller = asyncio.create_task(once.run("k", counter.work))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    gate.set()
    assert await once.run("k", counter.work) == 1


async def test_work_that_failed_is_tried_again() -> None:
    attempts = 0

    async def work() -> int:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ValueError
        return attempts

    once = IdempotentCalls[int](8)
    with pytest.raises(ValueError):
        await once.run("k", work)
    assert await once.run("k", work) == 2


async def test_only_the_last_results_are_kept() -> None:
    gate = asyncio.Event()
    gate.set()
    counter, once = Counter(gate), IdempotentCalls[int](2)
    for key in "abc":
        await once.run(key, counter.work)
    assert once.get("a") is None
    assert once.get("c") is not None
