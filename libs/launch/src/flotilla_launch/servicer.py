"""`LauncherService` over one supervisor.

Invariants: repeating a request changes nothing, because every call names a wanted state; `Restart` alone does not, and
no caller repeats it. A change that was begun continues when its caller goes away (a deadline, a closed terminal) and is
never left half done; only the stop of the whole stack interrupts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from grpc.aio import ServicerContext

from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceServicer
from flotilla_core.config import StackConfig, load_text
from flotilla_core.logger import get_logger
from flotilla_launch.supervisor import Supervisor

log = get_logger()

Result = TypeVar("Result")
Context = ServicerContext[Any, Any]


class LauncherServicer(LauncherServiceServicer):
    """Translates calls; the supervisor decides."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._changes: set[asyncio.Task[Any]] = set()

    async def Apply(self, request: pb.ApplyRequest, context: Context) -> pb.ApplyResponse:
        stack = load_text(StackConfig, request.stack_yaml)
        changed = await self._finished(self._supervisor.apply(stack))
        return pb.ApplyResponse(changed=changed, processes=self._supervisor.processes())

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        log.info("stop", name=request.name or "the whole stack", request_id=request.request_id)
        if request.name:
            await self._finished(self._supervisor.stop_process(request.name))
        else:
            await self._finished(self._supervisor.stop_all())
        return pb.StopResponse()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        processes = await self._finished(self._supervisor.scale(request.kind, request.replicas))
        return pb.ScaleResponse(processes=processes)

    async def Restart(self, request: pb.RestartRequest, context: Context) -> pb.RestartResponse:
        change = self._supervisor.restart(request.name, Path(request.executables))
        return pb.RestartResponse(process=await self._finished(change))

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        await self._supervisor.refresh_attached()
        return pb.ListResponse(
            stack=self._supervisor.stack.name,
            nats_url=self._supervisor.nats_url,
            processes=self._supervisor.processes(),
        )

    async def _finished(self, change: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._supervisor.require_running()  # The stop of the stack has cancelled it: say so.
            raise
