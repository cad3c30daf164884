"""Turns of many episodes share one call to a generator, and each is answered or fails by itself, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.common.v1.registration_pb2 import Registration
from flotilla.generator.v1 import generator_pb2 as pb
from flotilla.generator.v1 import generator_pb2_grpc
from flotilla_coordinator.rollouts import shared_calls
from flotilla_coordinator.rollouts.shared_calls import SharedCalls
from flotilla_core import rpc
from flotilla_core.errors import DeadlineExceeded, StaleVersion, Unavailable
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.rpc import status
from flotilla_testing.credentials import ours
from flotilla_testing.servers import serving

LIMIT_S = 20.0


class Generator(generator_pb2_grpc.GeneratorServiceServicer):
    """Answers what `answers` lets it, and keeps what each call said."""

    def __init__(self) -> None:
        self.calls: list[list[pb.GenerateManyRequest]] = []
        self.news = asyncio.Condition()
        self.answer: Callable[[pb.GenerateRequest], pb.GenerateAnswer | None] = lambda request: (
            pb.GenerateAnswer(
                request_id=request.request_id, samples=[pb.GeneratedSample(sample_id=request.request_id)]
            )
        )
        self.end = False

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Any
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        said: list[pb.GenerateManyRequest] = []
        self.calls.append(said)
        async for part in request_iterator:
            async with self.news:
                said.append(part)
                self.news.notify_all()
            if self.end:
                return
            answers = [answer for one in part.requests if (answer := self.answer(one)) is not None]
            yield pb.GenerateManyResponse(answers=answers, waiting_samples=3)

    async def heard(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S), self.news:
            await self.news.wait_for(enough)

    def asked(self) -> list[str]:
        return [one.request_id for call in self.calls for part in call for one in part.requests]


@pytest.fixture
async def fleet() -> AsyncIterator[tuple[Generator, Any]]:
    generator = Generator()
    async with serving(generator) as address, rpc.connect(address, credential=ours()) as channel:
        replica = SimpleNamespace(
            name="generator-0",
            instance_id="generator-0-abc",
            stub=generator_pb2_grpc.GeneratorServiceStub(channel),
            registration=Registration(protocol_version=PROTOCOL_VERSION),
        )
        yield generator, replica


def ask(calls: SharedCalls, replica: Any, name: str, timeout_s: float = LIMIT_S) -> asyncio.Task[Any]:
    return asyncio.create_task(calls.generate(replica, pb.GenerateRequest(request_id=name), timeout_s))


async def ended(task: Awaitable[Any]) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await task


async def test_requests_share_one_call_and_each_gets_its_own_answer(fleet):
    generator, replica = fleet
    calls = SharedCalls()
    asked = [ask(calls, replica, f"r{i}") for i in range(50)]
    for i, one in enumerate(asked):
        answer, waiting = await ended(one)
        assert ([sample.sample_id for sample in answer.samples], waiting) == ([f"r{i}"], 3)
    assert len(generator.calls) == 1 and len(generator.calls[0]) < 50
    assert sorted(generator.asked()) == sorted(f"r{i}" for i in range(50))


async def test_a_failure_is_that_of_its_request_alone(fleet):
    generator, replica = fleet
    answer, refused = generator.answer, StaleVersion("too old", where="there")
    failure = status.encode(refused).SerializeToString()
    generator.answer = lambda one: (
        pb.GenerateAnswer(request_id="bad", failure=failure) if one.request_id == "bad" else answer(one)
    )
    calls = SharedCalls()
    bad, good = ask(calls, replica, "bad"), ask(calls, replica, "good")
    with pytest.raises(StaleVersion, match="too old"):
        await ended(bad)
    assert (await ended(good))[0].request_id == "good"


async def test_a_call_that_breaks_fails_all_that_wait_and_the_next_request_begins_another(fleet):
    generator, replica = fleet
    answer, generator.answer = generator.answer, lambda _: None
    calls = SharedCalls()
    waiting = [ask(calls, replica, name) for name in "ab"]
    await generator.heard(lambda: len(generator.asked()) == 2)
    generator.end = True
    waiting.append(ask(calls, replica, "c"))
    for one in waiting:
        with pytest.raises(Unavailable, match="generator-0 ended the call early"):
            await ended(one)
    generator.end, generator.answer = False, answer
    assert (await ended(ask(calls, replica, "d")))[0].request_id == "d"
    assert len(generator.calls) == 2


async def test_a_generator_that_is_gone_fails_the_request_by_its_error(fleet):
    _, replica = fleet
    async with rpc.connect("127.0.0.1:1", credential=ours()) as nowhere:
        replica.stub = generator_pb2_grpc.GeneratorServiceStub(nowhere)
        with pytest.raises(Unavailable):
            await ended(ask(SharedCalls(), replica, "a"))


async def test_what_nobody_waits_for_is_taken_back(fleet):
    generator, replica = fleet
    generator.answer = lambda _: None
    dropped = ask(SharedCalls(), replica, "dropped")
    await generator.heard(lambda: "dropped" in generator.asked())
    dropped.cancel()
    await generator.heard(lambda: any(part.cancelled for part in generator.calls[0]))
    assert [name for part in generator.calls[0] for name in part.cancelled] == ["dropped"]


async def test_a_request_that_was_not_sent_yet_is_never_sent(fleet):
    generator, replica = fleet
    calls = SharedCalls()
    dropped = ask(calls, replica, "dropped")
    await asyncio.sleep(0)  # It is with the call now, which has not begun.
    dropped.cancel()
    await ended(ask(calls, replica, "kept"))
    assert generator.asked() == ["kept"]


async def test_a_request_without_an_answer_ends_at_its_limit_and_is_taken_back(fleet):
    generator, replica = fleet
    generator.answer = lambda _: None
    with pytest.raises(DeadlineExceeded, match="no answer within"):
        await ended(ask(SharedCalls(), replica, "a", timeout_s=0.1))
    await generator.heard(lambda: any("a" in part.cancelled for part in generator.calls[0]))


async def test_a_call_without_requests_ends_by_itself(fleet, monkeypatch):
    generator, replica = fleet
    monkeypatch.setattr(shared_calls, "LOOK_EVERY_S", 0.01)
    calls = SharedCalls()
    await ended(ask(calls, replica, "a"))
    async with asyncio.timeout(LIMIT_S):
        await next(iter(calls._calls.values())).reading
    assert (await ended(ask(calls, replica, "b")))[0].request_id == "b"
    assert len(generator.calls) == 2


def test_a_generator_of_the_release_before_gets_a_call_for_each_request():
    old, own = (
        SimpleNamespace(registration=Registration(protocol_version=one)) for one in ("3.0", PROTOCOL_VERSION)
    )
    assert (SharedCalls.takes(old), SharedCalls.takes(own)) == (False, True)
