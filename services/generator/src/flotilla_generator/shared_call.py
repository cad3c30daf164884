"""The requests of many episodes over one call.

Invariants: each request is answered once, and a failure is the answer of its request alone; what nobody waits for any
more leaves the engine; the call ends when its caller has ended its side and all is answered, or when the replica has
nothing left to do and drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from opentelemetry.trace import SpanKind

from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_core import telemetry
from flotilla_core.errors import FlotillaError, Internal
from flotilla_core.logger import get_logger
from flotilla_core.rpc import status
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.telemetry import names
from flotilla_core.telemetry.spans import TRACEPARENT, from_carrier

Answer: TypeAlias = Callable[[pb.GenerateRequest], Awaitable[list[pb.GeneratedSample]]]


logger = get_logger()


class SharedCalls:
    """The calls of a replica that carry many requests each."""

    def __init__(self, answer: Answer) -> None:
        """`answer` returns the samples of one request."""
        self._answer = answer
        self._taking: set[asyncio.Task[None]] = set()

    def end(self) -> None:
        """Let every call end after the answers that it has."""
        for taking in self._taking:
            taking.cancel()

    async def answers(
        self, parts: AsyncIterator[pb.GenerateManyRequest]
    ) -> AsyncGenerator[list[pb.GenerateAnswer]]:
        """Yield the answers of one call, those that are there together."""
        running: dict[str, asyncio.Task[None]] = {}
        answered: list[pb.GenerateAnswer] = []
        news = asyncio.Event()

        async def answer(request: pb.GenerateRequest) -> None:
            try:
                one = await self._answered(request)
                answered.append(one)
            finally:
                running.pop(request.request_id, None)
                news.set()

        async def take() -> None:
            async for part in parts:
                for name in part.cancelled:
                    if name in running:
                        running[name].cancel()
                for request in part.requests:
                    running[request.request_id] = asyncio.create_task(answer(request))

        taking = asyncio.create_task(take(), name="requests of a shared call")
        self._taking.add(taking)
        taking.add_done_callback(lambda _: news.set())
        try:
            while not taking.done() or running or answered:
                await news.wait()
                news.clear()
                together, answered = answered, []
                if together:
                    yield together
            if not taking.cancelled():
                taking.result()
        finally:
            self._taking.discard(taking)
            left = [taking, *running.values()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _answered(self, request: pb.GenerateRequest) -> pb.GenerateAnswer:
        about = {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: names.GENERATE}
        caller = from_carrier({TRACEPARENT: request.traceparent})
        try:
            with telemetry.span(names.GENERATE, kind=SpanKind.SERVER, attributes=about, parent=caller):
                samples = await self._answer(request)
        except FlotillaError as error:
            failure = status.encode(error)
        except Exception as error:  # the boundary of the service: whatever a request raises is its answer
            logger.exception("a request failed", request_id=request.request_id)
            failure = status.encode(Internal(f"{type(error).__name__}: {error}", where=names.GENERATE))
        else:
            return pb.GenerateAnswer(request_id=request.request_id, samples=samples)
        return pb.GenerateAnswer(request_id=request.request_id, failure=failure.SerializeToString())


def in_messages(answers: list[pb.GenerateAnswer], waiting: int) -> list[pb.GenerateManyResponse]:
    """Return answers as they travel, about two mebibytes in one message, each with how many samples wait."""
    message, size = pb.GenerateManyResponse(waiting_samples=waiting), 0
    messages = [message]
    for answer in answers:
        length = answer.ByteSize()
        if size and size + length > PART_BYTES:
            message, size = pb.GenerateManyResponse(waiting_samples=waiting), 0
            messages.append(message)
        message.answers.append(answer)
        size += length
    return messages
