"""A rank on another host: one call to the agent there, which lives as long as the rank.

Invariants: the rank is killed when the call ends, whoever ends it; an agent that is gone, or silent for too long, ends
the call; messages to users name the host. What the rank reads and writes are bytes here, as on the socket of a rank of
this host.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING

from flotilla.trainer.v1 import ranks_pb2 as pb
from flotilla_core import rpc
from flotilla_core.errors import DeadlineExceeded, FlotillaError, RankFailed
from flotilla_core.rpc.channel import PART_BYTES

if TYPE_CHECKING:
    from flotilla.trainer.v1.ranks_pb2_grpc import RankServiceAsyncStub

BEAT_S = 1.0
"""The interval at which each end of the call says that it lives, where it has nothing else to say."""
LOOK_TIMEOUT_S = 8.0


class RankWriter:
    """Sends what a rank shall read to the agent; to its user it is the writer of a connection."""

    def __init__(self, start: pb.RankStart) -> None:
        self._start = start
        self._parts: deque[bytes] = deque()
        self._more, self._sent = asyncio.Event(), asyncio.Event()
        self._closing = False

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send these bytes after the others."""
        for part in parts:
            for begin in range(0, len(part), PART_BYTES):
                self._parts.append(bytes(part[begin : begin + PART_BYTES]))
        self._sent.clear()
        self._more.set()

    async def drain(self) -> None:
        """Wait until everything was sent, or nothing can be sent any more."""
        await self._sent.wait()

    def is_closing(self) -> bool:
        """Return whether nothing is sent any more."""
        return self._closing

    def close(self) -> None:
        """Send nothing any more."""
        self._closing = True
        self._sent.set()
        self._more.set()

    async def requests(self) -> AsyncIterator[pb.RunRankRequest]:
        """Yield what the agent shall hear, until this is closed."""
        yield pb.RunRankRequest(start=self._start)
        while not self._closing:
            if self._parts:
                yield pb.RunRankRequest(data=self._parts.popleft())
                continue
            self._sent.set()
            self._more.clear()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._more.wait()
            except TimeoutError:
                yield pb.RunRankRequest()


class RemoteRank:
    """A rank that an agent runs."""

    def __init__(self, stub: RankServiceAsyncStub, where: str, rank: int, silence_s: float) -> None:
        self.where = where
        self.pid = 0
        self.log = self.stacks_file = ""
        self.reader = asyncio.StreamReader()
        self.writer = RankWriter(pb.RankStart(rank=rank, silence_s=silence_s))
        self._stub = stub
        self._rank = rank
        self._silence_s = silence_s
        self._how = self._last_log_line = ""
        self._born = asyncio.Event()
        self._running = asyncio.create_task(self._run(), name=f"rank {rank} on {where}")

    @classmethod
    async def start(
        cls, stub: RankServiceAsyncStub, where: str, rank: int, *, silence_s: float, limit_s: float
    ) -> RemoteRank:
        """Let the agent fork the process; the agent ends it when this front is silent for `silence_s`."""
        remote = cls(stub, where, rank, silence_s)
        born = asyncio.create_task(remote._born.wait())
        try:
            await asyncio.wait({born, remote._running}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            born.cancel()
            if not remote.pid:
                remote.kill()
        if remote.pid:
            return remote
        place = f"rank {rank} on host {where}"
        if remote.ended():
            raise RankFailed("a rank was not started", where=place, why=remote.ended())
        raise DeadlineExceeded(
            "a rank did not start",
            where=place,
            why=f"its agent forked none within {limit_s:g} s",
            next_step=f"see the log of the agent on {where}",
        )

    def ended(self) -> str:
        """Describe how the process ended; empty while it lives."""
        return self._how if self._running.done() else ""

    def last_log_line(self) -> str:
        """Return the last line that the process wrote, where its agent could still tell it."""
        return self._last_log_line

    async def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP or a debugger, as far as its agent answers."""
        return (await self._look(pb.LookAtRankRequest(rank=self._rank))).stopped

    async def stacks(self, *, wake: bool = False) -> str:
        """Return the stacks of all its threads; `wake` continues a stopped process so that it can write them."""
        return (await self._look(pb.LookAtRankRequest(rank=self._rank, stacks=True, wake=wake))).stacks

    def kill(self) -> None:
        """End the call, and with it the process and everything that it started."""
        self._running.cancel()

    async def gone(self) -> None:
        """Wait until the call has ended; the agent starts no rank in its place before the process has."""
        await asyncio.wait({self._running})  # A cancelled caller does not cancel this task.

    async def close(self, reading: asyncio.Task[None]) -> None:
        """Let the connection go, once the call has ended; `reading` reads from it."""
        reading.cancel()

    async def _run(self) -> None:
        try:
            stream = rpc.duplex(
                self._stub.RunRank, self.writer.requests(), idle_timeout_s=2 * self._silence_s
            )
            async with aclosing(stream) as responses:
                async for response in responses:
                    self._take(response)
            self._how = self._how or "was ended by its agent"
        except FlotillaError as error:
            self._how = self._how or f"was lost with its agent: {error.what}" + (
                f" ({error.why})" if error.why else ""
            )
        except asyncio.CancelledError:
            self._how = self._how or "was killed by its front"
            raise
        finally:
            self.reader.feed_eof()
            self.writer.close()

    def _take(self, response: pb.RunRankResponse) -> None:
        part = response.WhichOneof("part")
        if part == "data":
            self.reader.feed_data(response.data)
        elif part == "born":
            self.pid = response.born.pid
            self.log = f"{response.born.log} on {self.where}"
            self.stacks_file = f"{response.born.stacks} on {self.where}"
            self._born.set()
        elif part == "ended":
            self._how, self._last_log_line = response.ended.how, response.ended.last_log_line

    async def _look(self, request: pb.LookAtRankRequest) -> pb.LookAtRankResponse:
        try:
            return await rpc.unary(self._stub.LookAtRank, request, timeout_s=LOOK_TIMEOUT_S, attempts=1)
        except FlotillaError:
            return pb.LookAtRankResponse()  # A host that cannot be asked is what the caller reports.
