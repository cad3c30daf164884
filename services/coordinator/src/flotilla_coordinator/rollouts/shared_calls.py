"""One call to a generator for the turns of many episodes: a call of its own would cost more than a short turn in it.

Invariants: a request is answered once, or fails; one that nobody waits for any more is taken back. A call that breaks
fails all that wait for it, with its own error, and the next request begins another. A call without requests ends by
itself, so nobody has to close it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from flotilla.generator.v1 import generator_pb2 as pb
from flotilla_core import rpc, telemetry
from flotilla_core.errors import DeadlineExceeded, FlotillaError, Internal, Unavailable
from flotilla_core.protocol import major_of
from flotilla_core.rpc import Replica, status
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.telemetry import names
from flotilla_core.telemetry.spans import format_traceparent

if TYPE_CHECKING:
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub

FIRST_PROTOCOL = 4
"""Generators of an older one get a call for each request."""
LOOK_EVERY_S = 0.5
"""Time between two looks for requests that wait too long."""
IDLE_LOOKS = 10
"""Looks without any request, after which a call ends."""


@dataclass
class _Waiting:
    """A request on its way."""

    answer: asyncio.Future[tuple[pb.GenerateAnswer, int]]
    deadline: float


class SharedCalls:
    """The calls of one run, at most one to each replica."""

    def __init__(self) -> None:
        self._calls: dict[str, _SharedCall] = {}

    @staticmethod
    def takes(replica: Replica[GeneratorServiceAsyncStub]) -> bool:
        """Return whether a replica knows such calls."""
        return (major_of(replica.registration.protocol_version) or 0) >= FIRST_PROTOCOL

    async def generate(
        self, replica: Replica[GeneratorServiceAsyncStub], request: pb.GenerateRequest, timeout_s: float
    ) -> tuple[pb.GenerateAnswer, int]:
        """Return the answer to a request, and how many samples wait on the replica; raise why it failed."""
        call = self._calls.get(replica.instance_id)
        if call is None or call.over:
            call = self._calls[replica.instance_id] = _SharedCall(replica)
            call.reading.add_done_callback(lambda _: self._forget(replica.instance_id, call))
        about = {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: names.GENERATE}
        with telemetry.span(names.GENERATE, kind=SpanKind.CLIENT, attributes=about) as span:
            if (context := span.get_span_context()).is_valid:
                request.traceparent = format_traceparent(context)
            return await call.generate(request, timeout_s)

    def _forget(self, instance_id: str, call: _SharedCall) -> None:
        if self._calls.get(instance_id) is call:
            del self._calls[instance_id]


class _SharedCall:
    """One call, from its first request until it has had none for a while."""

    def __init__(self, replica: Replica[GeneratorServiceAsyncStub]) -> None:
        self._replica = replica
        self._asked: list[pb.GenerateRequest] = []
        self._cancelled: list[str] = []
        self._waiting: dict[str, _Waiting] = {}
        self._news = asyncio.Event()
        self.over = False
        """True where it takes no further request."""
        self.reading = asyncio.create_task(self._read(), name=f"shared call to {replica.name}")

    async def generate(self, request: pb.GenerateRequest, timeout_s: float) -> tuple[pb.GenerateAnswer, int]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[pb.GenerateAnswer, int]] = loop.create_future()
        self._waiting[request.request_id] = _Waiting(answer, loop.time() + timeout_s)
        self._asked.append(request)
        self._news.set()
        try:
            return await answer
        finally:
            if self._waiting.pop(request.request_id, None) is not None:
                self._cancelled.append(request.request_id)
                self._news.set()

    async def _read(self) -> None:
        error: FlotillaError = Unavailable(f"{self._replica.name} ended the call early")
        try:
            stream = rpc.duplex(self._replica.stub.GenerateMany, self._parts(), idle_timeout_s=None)
            async with aclosing(stream) as responses:
                async for response in responses:
                    for answer in response.answers:
                        self._answered(answer, response.waiting_samples)
        except FlotillaError as failure:
            error = failure
        finally:
            self.over = True
            for one in self._waiting.values():
                if not one.answer.done():
                    one.answer.set_exception(error)
            self._waiting.clear()

    def _answered(self, answer: pb.GenerateAnswer, waiting: int) -> None:
        one = self._waiting.pop(answer.request_id, None)
        if one is None or one.answer.done():
            return  # nobody waits for it any more
        if answer.failure:
            failure = status.from_status(answer.failure) or Internal("an answer with an unknown failure")
            one.answer.set_exception(failure)
        else:
            one.answer.set_result((answer, waiting))

    async def _parts(self) -> AsyncIterator[pb.GenerateManyRequest]:
        """Yield what is there to say, and end once nothing was for a while."""
        idle = 0
        try:
            while self._waiting or self._cancelled or idle < IDLE_LOOKS:
                try:
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._news.wait()
                except TimeoutError:
                    idle = 0 if self._waiting else idle + 1
                    self._expire()
                    continue
                self._news.clear()
                for part in self._said():
                    yield part
        except asyncio.CancelledError:
            return  # It ends with its call. Where it raised, gRPC would write a traceback that nobody reads.
        finally:
            self.over = True

    def _said(self) -> list[pb.GenerateManyRequest]:
        """Take what is to be said, about two mebibytes in one message."""
        part, size = pb.GenerateManyRequest(cancelled=self._cancelled), 0
        parts = [part]
        for request in self._asked:
            if request.request_id not in self._waiting:
                continue
            length = request.ByteSize()
            if size and size + length > PART_BYTES:
                part, size = pb.GenerateManyRequest(), 0
                parts.append(part)
            part.requests.append(request)
            size += length
        self._asked, self._cancelled = [], []
        return parts

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for one in self._waiting.values():
            if one.deadline <= now and not one.answer.done():
                one.answer.set_exception(
                    DeadlineExceeded("no answer within the time limit of a sample", where=self._replica.name)
                )
