"""The agent of a gang on a further host: it runs ranks of this host for the front, which is on another one.

Invariants: a rank lives no longer than the call that started it, nor than this process; it is killed when its front is
silent for as long as the front said; of each number there is one rank at a time, the newest. This process never
imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from flotilla.common.v1 import operate_pb2
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.trainer.v1 import ranks_pb2 as pb
from flotilla.trainer.v1 import ranks_pb2_grpc
from flotilla_core import rpc, telemetry
from flotilla_core.errors import InvalidRequest, NotFound
from flotilla_core.findings import passed
from flotilla_core.gangs import agent_of
from flotilla_core.logger import get_logger
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.service import Host
from flotilla_core.transfer import own_folder
from flotilla_trainer.gang.fork_server import RankForkServer
from flotilla_trainer.gang.local_rank import LocalRank
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.remote_rank import BEAT_S
from flotilla_trainer.wire.settings import SHARDS

SERVICE_NAME = "flotilla.trainer.v1.RankService"
REAP_TIMEOUT_S = 3.0

logger = get_logger()


class RankAgent:
    """The service of one host of one gang."""

    def __init__(self, host: Host) -> None:
        gang, place = agent_of(host.stack, host.name)
        self._plan = GangPlan.of_stack(
            host.stack,
            gang,
            host.instance_id,
            Path(),  # The front says where the model is, when it starts a rank.
            host.state_dir / "logs",
            telemetry.endpoints(),
            str(host.credential.path),
            host=place,
        )
        self._fork_server = RankForkServer(
            self._plan.environment(), self._plan.log_path(self._plan.ranks_here[0])
        )
        # Of this agent alone: where hosts share the state directory, others of its gang write beside it.
        parts = host.state_dir / "rank-parts" / host.name
        self._servicer = RankServicer(self._plan, self._fork_server, host, parts)

    def add_to(self, server: rpc.RpcServer) -> None:
        """Add RankService to the server."""
        server.add(ranks_pb2_grpc.add_RankServiceServicer_to_server, self._servicer, SERVICE_NAME)

    async def start(self) -> None:
        """Do nothing: the front starts the ranks."""

    def describe(self, registration: Registration) -> None:
        """Write the number of ranks into the registration."""
        registration.capacity["nproc"] = len(self._plan.ranks_here)

    async def check(self) -> list[Finding]:
        """Tell which ranks run; none is no fault, because the front may be away."""
        running = ", ".join(str(rank) for rank in sorted(self._servicer.ranks)) or "none"
        return [passed("ranks", f"of {self._plan.name}: {running}")]

    async def dump_stacks(self) -> list[operate_pb2.ProcessStacks]:
        """Return the stacks of the ranks of this host."""
        ranks = dict(self._servicer.ranks)
        texts = await asyncio.gather(*(rank.stacks() for rank in ranks.values()))
        return [
            operate_pb2.ProcessStacks(
                process=f"rank {number}", pid=rank.pid, text=text or "stopped, or no answer"
            )
            for (number, rank), text in zip(ranks.items(), texts, strict=True)
        ]

    async def drain(self, grace_s: float) -> None:
        """Do nothing: the front loses its gang when this host ends, whatever the gang is doing."""

    async def stop(self) -> None:
        """End the ranks."""
        await self._servicer.end()
        self._fork_server.close()


class RankServicer(ranks_pb2_grpc.RankServiceServicer):
    """RankService of one host."""

    def __init__(self, plan: GangPlan, fork_server: RankForkServer, host: Host, parts: Path) -> None:
        self.ranks: dict[int, LocalRank] = {}
        """The ranks that run, by number."""
        self._plan = plan
        self._fork_server = fork_server
        self._host = host
        self._parts = parts
        self._locks: dict[int, asyncio.Lock] = {}

    async def DescribeHost(self, request: pb.DescribeHostRequest, context: Any) -> pb.DescribeHostResponse:
        plan = self._plan
        return pb.DescribeHostResponse(credential_file=plan.credential_file or "", otlp=plan.otlp)

    async def BringFolder(self, request: pb.BringFolderRequest, context: Any) -> pb.BringFolderResponse:
        if not request.folder.address or not (request.folder.digest or request.folder.stamp):
            raise InvalidRequest("the folder has no name, or nobody offers it", where="folder")
        path = await self._host.files.here(request.folder, sealed=request.sealed)
        return pb.BringFolderResponse(path=str(path))

    async def MakePart(self, request: pb.MakePartRequest, context: Any) -> pb.MakePartResponse:
        folder = await asyncio.to_thread(self._new_part, request.name)
        return pb.MakePartResponse(path=str(folder))

    async def OfferPart(self, request: pb.OfferPartRequest, context: Any) -> pb.OfferPartResponse:
        shards = own_folder(self._parts, request.name) / SHARDS
        if not shards.is_dir():
            return pb.OfferPartResponse()
        return pb.OfferPartResponse(folder=await self._host.files.offer_here(shards))

    async def LookAtRank(self, request: pb.LookAtRankRequest, context: Any) -> pb.LookAtRankResponse:
        rank = self.ranks.get(request.rank)
        if rank is None:
            raise NotFound(f"rank {request.rank} does not run here", where=self._plan.name)
        stopped = await rank.is_stopped()
        stacks = await rank.stacks(wake=request.wake) if request.stacks else ""
        return pb.LookAtRankResponse(stopped=stopped, stacks=stacks)

    async def RunRank(
        self, request: AsyncIterator[pb.RunRankRequest], context: Any
    ) -> AsyncIterator[pb.RunRankResponse]:
        requests = aiter(request)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "start":
            raise InvalidRequest("the first request does not start a rank", where="RunRank")
        number, silence_s = first.start.rank, first.start.silence_s
        if number not in self._plan.ranks_here:
            here = self._plan.ranks_here
            raise InvalidRequest(
                f"rank {number} does not belong on this host",
                where=f"{self._plan.name}, host {self._plan.host}",
                why=f"its stack file has ranks {here[0]} to {here[-1]} here",
                next_step="use one stack file on all hosts",
            )
        starting = asyncio.create_task(self._started(number), name=f"start of rank {number}")
        try:
            while not (await asyncio.wait({starting}, timeout=BEAT_S))[0]:
                yield pb.RunRankResponse()
            rank = starting.result()
            born = pb.RankBorn(pid=rank.pid, log=rank.log, stacks=rank.stacks_file)
            yield pb.RunRankResponse(born=born)
            async with aclosing(_told(rank, requests, silence_s)) as responses:
                async for response in responses:
                    yield response
        finally:
            await self._over(number, starting)

    async def end(self) -> None:
        """Kill all ranks; their calls end then."""
        for rank in [*self.ranks.values()]:
            await self._end(rank)

    async def _started(self, number: int) -> LocalRank:
        """Start a rank, after the one of this number that runs, if any, has ended."""
        async with self._locks.setdefault(number, asyncio.Lock()):
            if (older := self.ranks.pop(number, None)) is not None:
                await self._end(older)
            rank = self.ranks[number] = await LocalRank.start(self._plan, number, self._fork_server)
        logger.info("a rank was started", rank=number, pid=rank.pid)
        return rank

    async def _over(self, number: int, starting: asyncio.Task[LocalRank]) -> None:
        """End what a call has started, however far it came."""
        starting.cancel()
        await asyncio.wait({starting})
        if starting.cancelled() or starting.exception() is not None:
            return
        rank = starting.result()
        await self._end(rank)
        if self.ranks.get(number) is rank:
            del self.ranks[number]
        rank.writer.close()
        logger.info("a rank has ended", rank=number, pid=rank.pid, how=rank.ended())

    async def _end(self, rank: LocalRank) -> None:
        """Kill a rank and wait until it is gone; end a fork server that does not tell so, and its ranks with it."""
        rank.kill()
        ending = asyncio.create_task(rank.gone())
        _, missing = await asyncio.wait({ending}, timeout=REAP_TIMEOUT_S)
        if missing:
            self._fork_server.close()
            await asyncio.wait({ending})

    def _new_part(self, name: str) -> Path:
        shutil.rmtree(self._parts, ignore_errors=True)
        return own_folder(self._parts, name)


async def _hear(requests: AsyncIterator[pb.RunRankRequest], rank: LocalRank, silence_s: float) -> str:
    """Pass on what the front sends to a rank; return why nothing comes any more."""
    while True:
        try:
            async with asyncio.timeout(silence_s):
                request = await anext(requests, None)
        except TimeoutError:
            return f"the front was silent for {silence_s:g} s"
        if request is None:
            return "the front sends nothing any more"
        if request.data and not rank.writer.is_closing():
            rank.writer.write(request.data)
            # A rank that is gone reads nothing: the other direction says how it ended.
            with contextlib.suppress(ConnectionError):
                await rank.writer.drain()


async def _told(
    rank: LocalRank, requests: AsyncIterator[pb.RunRankRequest], silence_s: float
) -> AsyncGenerator[pb.RunRankResponse]:
    """Yield what a rank writes, and how it ended; end early when the front has gone."""
    hearing = asyncio.create_task(_hear(requests, rank, silence_s), name=f"front of rank {rank.pid}")
    reading = asyncio.create_task(rank.reader.read(PART_BYTES))
    try:
        while True:
            done, _ = await asyncio.wait(
                {reading, hearing}, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if reading in done:
                data = _read(reading)
                if not data:
                    break
                yield pb.RunRankResponse(data=data)
                reading = asyncio.create_task(rank.reader.read(PART_BYTES))
            elif hearing in done:
                logger.warning("a rank is ended", pid=rank.pid, why=hearing.result())
                return
            else:
                yield pb.RunRankResponse()
    finally:
        reading.cancel()
        hearing.cancel()
    await rank.gone()
    ended = pb.RankEnded(how=rank.ended(), last_log_line=rank.last_log_line())
    yield pb.RunRankResponse(ended=ended)


def _read(reading: asyncio.Task[bytes]) -> bytes:
    try:
        return reading.result()
    except ConnectionError:
        return b""
