"""Calls of vLLM's workers end with their answers, or with the engine."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flotilla_core.errors import Exhausted, FlotillaError, Internal, Unavailable, WeightGroupFailed
from flotilla_generator.engine.vllm import worker, worker_calls
from flotilla_generator.engine.vllm.end_notices import SECRET_BYTES, EndNotices, tell
from flotilla_generator.engine.vllm.worker_calls import WorkerCalls

LIMIT_S = 10.0


class Workers:
    """Two workers that answer when they are let; who asks a dead engine hears nothing, as with vLLM."""

    def __init__(self) -> None:
        self.errored = False
        self.answering = asyncio.Event()
        self.asked: list[str] = []
        self.first: dict[str, Any] = {"error": ""}
        self.error: dict[str, Any] = {"error": ""}

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.asked.append(method)
        await self.answering.wait()
        return [self.first, self.error]


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
    workers.error = {"error": "rank 1: the sender hung up", "reason": WeightGroupFailed.reason}
    with pytest.raises(WeightGroupFailed, match="rank 1: the sender hung up"):
        await WorkerCalls(lambda: workers).require("stage")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (MemoryError("no room to stage"), Exhausted),
        (torch.OutOfMemoryError("CUDA out of memory"), Exhausted),
        (KeyError("lm_head.weight"), Internal),
        (Unavailable("the sender's store does not answer"), Unavailable),
        (WeightGroupFailed("another member failed"), WeightGroupFailed),
    ],
)
@pytest.mark.parametrize("on_a_thread", [False, True])
async def test_a_workers_own_fault_is_no_failure_of_the_group(
    raised: Exception, kind: type[FlotillaError], on_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise raised

    weights = worker.WorkerWeights(SimpleNamespace(device=torch.device("cpu"), rank=0))
    answering = worker.WeightWorker()
    monkeypatch.setattr(answering, "_flotilla_weights", weights, raising=False)
    if on_a_thread:
        weights.run_aside(lambda: fails(None), b"")
        assert weights.thread is not None
        weights.thread.join(LIMIT_S)
        fault = answering.flotilla_status()
    else:
        monkeypatch.setattr(weights.kv_memory, "give_back", partial(fails, None))
        fault = answering.flotilla_sleep()
    workers = Workers()
    workers.answering.set()
    workers.error = fault
    with pytest.raises(kind, match=str(raised).strip("'")) as caught:
        await WorkerCalls(lambda: workers).require("stage")
    assert type(caught.value) is kind


class Receiving(Workers):
    """Workers that receive until they are done, and how often they were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = True
        self.ticket: bytes = b""
        self.counts: list[int] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.asked.append(method)
        if method == "stage":
            (self.ticket,) = args
        return [{"error": "", "busy": self.busy, "buckets": 3}] * 2


Transfer = tuple[Receiving, asyncio.Task[worker_calls.Answers]]


def ended(rank: int, **others: Any) -> dict[str, Any]:
    return {"rank": rank, "error": "", "busy": False, "buckets": 5, **others}


@pytest.fixture
async def receiving(monkeypatch: pytest.MonkeyPatch) -> Transfer:
    """Workers that receive, and the transfer that waits for them: nobody asks them before a test is over."""
    monkeypatch.setattr(worker_calls, "PROGRESS_POLL_S", 60.0)
    workers = Receiving()
    calls = WorkerCalls(lambda: workers)
    transfer = asyncio.create_task(calls.transfer("stage", (), workers.counts.append))
    await asked(workers, "stage")
    return workers, transfer


async def test_a_transfer_ends_with_what_its_workers_tell_and_nobody_is_asked(receiving: Transfer) -> None:
    workers, transfer = receiving
    tell(workers.ticket, ended(1, digests=[2**64 - 1]))
    tell(workers.ticket, ended(0, digests=[7]))
    answers = await asyncio.wait_for(transfer, LIMIT_S)
    assert [answer["digests"] for answer in answers] == [[7], [2**64 - 1]], "by rank"
    assert workers.asked == ["stage"] and workers.counts == [5]


async def test_an_error_that_a_worker_tells_fails_the_transfer(receiving: Transfer) -> None:
    workers, transfer = receiving
    tell(workers.ticket, ended(0))
    tell(workers.ticket, ended(1, error="CUDA out of memory", reason=Exhausted.reason))
    with pytest.raises(Exhausted, match="CUDA out of memory"):
        await asyncio.wait_for(transfer, LIMIT_S)


async def test_an_answer_that_no_datagram_holds_is_asked_for(receiving: Transfer) -> None:
    workers, transfer = receiving
    workers.busy = False
    tell(workers.ticket, ended(0, digests=[2**63] * 100_000))
    assert (await asyncio.wait_for(transfer, LIMIT_S))[0]["buckets"] == 3
    assert workers.asked == ["stage", "flotilla_status"]


async def test_a_notice_of_someone_who_does_not_know_the_secret_counts_for_nothing(
    receiving: Transfer,
) -> None:
    workers, transfer = receiving
    forged = bytes(SECRET_BYTES) + workers.ticket[SECRET_BYTES:]
    for rank in (0, 1):
        tell(forged, ended(rank, digests=[666]))
        tell(workers.ticket, ended(rank, digests=[7]))
    answers = await asyncio.wait_for(transfer, LIMIT_S)
    assert [answer["digests"] for answer in answers] == [[7], [7]]


async def test_a_notice_that_was_lost_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "PROGRESS_POLL_S", 0.01)
    workers = Receiving()
    counts: list[int] = []
    transfer = asyncio.create_task(WorkerCalls(lambda: workers).transfer("stage", (), counts.append))
    await asked(workers, "flotilla_status")
    tell(workers.ticket, ended(0))
    workers.busy = False
    assert await asyncio.wait_for(transfer, LIMIT_S)
    assert workers.asked.count("flotilla_status") >= 2 and set(counts) == {3}, "it was asked without a notice"


async def test_a_worker_tells_how_a_transfer_ended() -> None:
    weights = worker.WorkerWeights(SimpleNamespace(device=torch.device("cpu"), rank=0))
    going_on = threading.Event()

    def transfer() -> None:
        assert going_on.wait(LIMIT_S)

    with EndNotices() as notices:
        weights.run_aside(transfer, notices.ticket)
        assert weights.status()["busy"]
        going_on.set()
        (told,) = await notices.of_all(1, LIMIT_S) or [{}]
    assert told == {"error": "", **weights.status()} and not told["busy"]
    weights.run_aside(lambda: None, notices.ticket)  # nobody listens: the worker goes on
    assert weights.thread is not None
    weights.thread.join(LIMIT_S)
    assert not weights.status()["busy"]


async def test_a_fault_of_one_worker_goes_before_what_the_other_says_of_the_broken_group() -> None:
    workers = Workers()
    workers.answering.set()
    workers.first = {"error": "another member failed", "reason": WeightGroupFailed.reason}
    workers.error = {"error": "CUDA out of memory", "reason": Exhausted.reason}
    with pytest.raises(Exhausted, match="another member failed; CUDA out of memory"):
        await WorkerCalls(lambda: workers).require("stage")
