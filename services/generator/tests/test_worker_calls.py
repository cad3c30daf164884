"""Calls of vLLM's workers end with their answers, or with the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flotilla_core.errors import Unavailable, WeightGroupFailed
from flotilla_generator.engine.vllm import worker_calls
from flotilla_generator.engine.vllm.worker_calls import WorkerCalls

LIMIT_S = 10.0


class Workers:
    """Two workers that answer when they are let; who asks a dead engine hears nothing, as with vLLM."""

    def __init__(self) -> None:
        self.errored = False
        self.answering = asyncio.Event()
        self.asked: list[str] = []
        self.error = ""

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.asked.append(method)
        await self.answering.wait()
        return [{"error": ""}, {"error": self.error}]


async def asked(workers: Workers, method: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while method not in workers.asked:
            await asyncio.sleep(0)


async def test_an_engine_that_dies_ends_the_call_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "HEALTH_POLL_S", 0.01)
    workers = Workers()
    calls = WorkerCalls(lambda: workers)
    waiting = asyncio.create_task(calls.ask("stage"))
    await asked(workers, "stage")
    workers.errored = True
    with pytest.raises(Unavailable, match=r"engine process died.*stage got no answer"):
        await asyncio.wait_for(waiting, LIMIT_S)


async def test_a_caller_who_is_cancelled_waits_for_the_answer_that_is_under_way() -> None:
    workers = Workers()
    calls = WorkerCalls(lambda: workers)
    cancelled = asyncio.create_task(calls.ask("stage"))
    await asked(workers, "stage")
    cancelled.cancel()
    following = asyncio.create_task(calls.ask("status"))
    await asyncio.sleep(0)
    assert not cancelled.done() and workers.asked == ["stage"]
    workers.answering.set()
    assert len(await asyncio.wait_for(following, LIMIT_S)) == 2
    assert cancelled.cancelled()


async def test_an_error_of_one_worker_fails_what_all_must_do() -> None:
    workers = Workers()
    workers.answering.set()
    workers.error = "rank 1: the sender hung up"
    with pytest.raises(WeightGroupFailed, match="rank 1: the sender hung up"):
        await WorkerCalls(lambda: workers).require("stage")
