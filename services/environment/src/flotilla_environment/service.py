"""The environment service as the host runs it, and its calls on the wire.

Invariant: a call that waits for a worker, loads a file or works gives signs of life, so its caller needs no guess of
how long that takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.operate_pb2 import ProcessStacks
from flotilla.common.v1.registration_pb2 import Registration
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla.environment.v1 import environment_pb2_grpc
from flotilla_core.config import EnvironmentServiceConfig
from flotilla_core.errors import InvalidRequest, Unavailable
from flotilla_core.findings import passed, warned
from flotilla_core.rpc import RpcServer
from flotilla_core.transfer import Files
from flotilla_environment import catalog
from flotilla_environment.episode import play
from flotilla_environment.stage import Stage

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """EnvironmentService on the wire; a drain waits until no episode runs."""

    def __init__(self, stage: Stage, files: Files) -> None:
        self._stage = stage
        self._files = files
        self.playing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._closing: set[asyncio.Task[None]] = set()

    async def drain(self) -> None:
        """Begin no episode, and wait until every one has ended."""
        self._draining = True
        await self._idle.wait()

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: Context
    ) -> pb.ListEnvironmentsResponse:
        return pb.ListEnvironmentsResponse(environments=catalog.list_environments())

    async def RunEpisode(
        self, request_iterator: AsyncIterator[pb.RunEpisodeRequest], context: Context
    ) -> AsyncIterator[pb.RunEpisodeResponse]:
        if self._draining:
            raise Unavailable("the replica is draining")
        parts = aiter(request_iterator)
        first = await anext(parts, None)
        if first is None or first.WhichOneof("part") != "start":
            raise InvalidRequest("an episode begins with its start")
        start = first.start
        with self._counted():
            code = None
            if start.environment.HasField("code"):
                code = await self._files.here(start.environment.code, start.run_id)
            episode = self._stage.episode(start, code)
            try:
                async with aclosing(play(episode, parts)) as responses:
                    async for response in responses:
                        yield response
            finally:
                # Whoever left waits for nothing.
                closing = asyncio.create_task(episode.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.playing += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.playing -= 1
            if not self.playing:
                self._idle.set()


class EnvironmentHostService:
    """Owns the workers; calls come and go on the host's server."""

    def __init__(self, config: EnvironmentServiceConfig, files: Files) -> None:
        self._workers = config.workers
        self._stage = Stage(config)
        self._holders = self._stage.holders
        self._servicer = EnvironmentServicer(self._stage, files)

    def add_to(self, server: RpcServer) -> None:
        add = environment_pb2_grpc.add_EnvironmentServiceServicer_to_server
        server.add(add, self._servicer, SERVICE_NAME)

    async def start(self) -> None:
        await self._stage.start()

    def describe(self, registration: Registration) -> None:
        registration.capacity["workers"] = self._workers
        registration.isolation = self._holders.jail.isolation

    async def check(self) -> list[Finding]:
        found = (
            f"{self._servicer.playing} episodes in {len(self._holders.pids)} workers; {self._holders.lost} workers "
            "were lost since the start"
        )
        findings = [passed("environment workers", found)]
        if self._holders.lost:
            findings = [
                warned(
                    "environment workers", found, "Read the log of this service: user code may crash or hang."
                )
            ]
        findings.append(self._holders.jail.finding)
        if hidden := catalog.CATALOG.hidden_entry_points():
            found = f"{', '.join(hidden)}: hidden by the built-in environment of the same name"
            findings.append(warned("environment entry points", found, "Give the entry point another name."))
        return findings

    async def dump_stacks(self) -> list[ProcessStacks]:
        """Workers run user code that may be stuck: their kernel state is all that is safe to read."""
        return [
            ProcessStacks(process=worker, pid=pid, text=await asyncio.to_thread(_state_of, pid))
            for worker, pid in self._holders.pids.items()
        ]

    async def drain(self, grace_s: float) -> None:
        """Let running episodes end; the host waits no longer than `grace_s`."""
        await self._servicer.drain()

    async def stop(self) -> None:
        await self._stage.stop()


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError as error:
        return f"gone: {error}"
