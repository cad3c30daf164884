"""OperateService: the calls that every service answers, in any state, and the current stacks of its process.

Invariants: these answers need no state of the service beyond its own hooks, so they work while it boots, while it is
busy and while it drains. Looking at the stacks of threads and tasks disturbs nothing: every frame is read from the
interpreter's own tables.
"""

from __future__ import annotations

import asyncio
import collections
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.registration_pb2 import Registration
from flotilla_core.disk import free_bytes, lacks_room, room
from flotilla_core.errors import Exhausted, InvalidRequest, NotFound
from flotilla_core.findings import failed, found_of, passed, warned
from flotilla_core.log_files import Follower
from flotilla_core.service.host import Host, Service

SERVICE_NAME = "flotilla.common.v1.OperateService"
_POLL_S = 0.2
_LONGEST_PROFILE_S = 120.0
_LOW_DISK_BYTES = 2 * 1024**3


class OperateServicer(operate_pb2_grpc.OperateServiceServicer):
    """Answers for one service process."""

    def __init__(
        self, host: Host, service: Service, registration: Registration, drain: Callable[[float | None], None]
    ) -> None:
        self._host = host
        self._service = service
        self._registration = registration
        self._drain = drain
        self._profiling = False

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        module = sys.modules[type(self._service).__module__]
        described = pb.DescribeResponse(
            registration=self._registration,
            log_path=str(self._log_path()),
            source_path=str(getattr(module, "__file__", "")),
        )
        described.now.FromNanoseconds(time.time_ns())
        return described

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        findings = [self._check_nats(), self._check_disk(), *await self._service.check()]
        return pb.CheckResponse(
            results=[
                pb.CheckResult(
                    name=one.code,
                    status=pb.CheckStatus.ValueType(one.severity),
                    finding=found_of(one),
                    remedy=one.next_step,
                )
                for one in findings
            ]
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._drain(request.grace.ToTimedelta().total_seconds() if request.HasField("grace") else None)
        return pb.DrainResponse()

    async def DumpStacks(self, request: pb.DumpStacksRequest, context: Any) -> pb.DumpStacksResponse:
        own = pb.ProcessStacks(process="main", pid=os.getpid(), text=format_stacks())
        return pb.DumpStacksResponse(processes=[own, *await self._service.dump_stacks()])

    async def GetActivity(self, request: pb.GetActivityRequest, context: Any) -> pb.GetActivityResponse:
        return pb.GetActivityResponse(activities=self._host.activities.current())

    async def TailLog(self, request: pb.TailLogRequest, context: Any) -> AsyncIterator[pb.TailLogResponse]:
        path = self._log_path()
        if not path.exists():
            raise NotFound(
                f"{self._host.name} has no log file",
                where=str(path),
                why="it was started by hand, so its log is where its output goes",
            )
        log = Follower(path)
        # What is read at once is small and local: it does not hold up the loop.
        lines = log.last(request.lines)
        while True:
            for line in lines:
                yield pb.TailLogResponse(line=line)
            if not request.follow:
                return
            if not lines:
                await asyncio.sleep(_POLL_S)
            lines = log.more()

    async def Profile(self, request: pb.ProfileRequest, context: Any) -> pb.ProfileResponse:
        duration_s = request.duration.ToTimedelta().total_seconds()
        if not 0 < duration_s <= _LONGEST_PROFILE_S or not 1 <= request.samples_per_second <= 1000:
            raise InvalidRequest(
                "a profile takes up to 120 s at 1 to 1000 samples a second",
                why=f"asked for {duration_s:g} s at {request.samples_per_second}",
            )
        # Each takes a thread that other work needs as well.
        if self._profiling:
            raise Exhausted("another profile is being taken", next_step="ask again when it has ended")
        self._profiling, over = True, threading.Event()
        try:
            stacks = await asyncio.to_thread(sample_stacks, duration_s, request.samples_per_second, over)
        finally:
            over.set()
            self._profiling = False
        return pb.ProfileResponse(collapsed_stacks=stacks)

    def _log_path(self) -> Path:
        return self._host.state_dir / "logs" / f"{self._host.name}.log"

    def _check_nats(self) -> Finding:
        url = self._host.bus.url
        if self._host.bus.connected:
            return passed("nats", f"connected to {url}")
        remedy = "Restart the stack's NATS server; services reconnect by themselves."
        return failed("nats", f"no connection to {url}", remedy)

    def _check_disk(self) -> Finding:
        if full := lacks_room(self._host.state_dir):
            remedy = "Free space there: runs that wait for it continue by themselves."
            return failed("disk", found_of(full.finding()), remedy)
        found = f"{self._host.state_dir}: {room(self._host.state_dir)}"
        if free_bytes(self._host.state_dir) >= _LOW_DISK_BYTES:
            return passed("disk", found)
        return warned("disk", found, "Free space or move state_dir.")


def format_stacks() -> str:
    """Format the stacks of every thread and every task of the running loop."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    frames = sys._current_frames()
    # One of these frames is this function's own. A name that kept it would make a circle, which holds all of the text
    # and the caller's request until a garbage collection.
    while frames:
        ident = next(iter(frames))
        stack = "".join(traceback.format_stack(frames.pop(ident)))
        parts.append(f"--- thread {threads.get(ident, ident)}\n{stack}")
    for task in sorted(asyncio.all_tasks(), key=lambda one: one.get_name()):
        lines = "".join(traceback.format_list(_awaiting(task.get_coro())))
        parts.append(f"--- task {task.get_name()}\n{lines or '  (not started)'}")
    return "\n".join(parts)


def sample_stacks(duration_s: float, samples_per_second: int, over: threading.Event) -> str:
    """Collapsed stacks of all other threads, "thread;frame;frame count" a line, until `over` is set at the latest.

    Blocks: call it in a thread.
    """
    own = threading.get_ident()
    counts: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + duration_s
    while time.monotonic() < end and not over.is_set():
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != own:
                counts[";".join([names.get(ident, str(ident)), *_frame_names(frame)])] += 1
        over.wait(1 / samples_per_second)
    return "\n".join(f"{stack} {count}" for stack, count in counts.most_common())


def _frame_names(frame: FrameType | None) -> list[str]:
    names: list[str] = []
    while frame is not None:
        names.append(_label(frame.f_code))
        frame = frame.f_back
    return names[::-1]


def _label(code: CodeType) -> str:
    module = code.co_filename.rpartition("site-packages/")[2].rpartition("/src/")[2]
    return f"{code.co_qualname} ({module})"


def _awaiting(coroutine: Any) -> traceback.StackSummary:
    """Return the chain of awaits below a task, outermost first, which `Task.get_stack` leaves out."""
    frames: list[tuple[FrameType, int]] = []
    while coroutine is not None:
        frame = (
            getattr(coroutine, "cr_frame", None)
            or getattr(coroutine, "ag_frame", None)
            or getattr(coroutine, "gi_frame", None)
        )
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        coroutine = (
            getattr(coroutine, "cr_await", None)
            or getattr(coroutine, "ag_await", None)
            or getattr(coroutine, "gi_yieldfrom", None)
        )
    return traceback.StackSummary.extract(iter(frames), lookup_lines=True)
