"""The same client without asyncio: every method waits.

Invariant: one background thread runs one event loop; it ends with `close` or the `with` block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1.run_pb2 import Plan, Run, RunEvent
from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
from flotilla_client.client import Client, RunFiles

if TYPE_CHECKING:
    from flotilla_client.loop import Loop
    from flotilla_client.synchronous_loop import SyncLoop

Result = TypeVar("Result")
_END: Any = object()


def connect(
    stack: str = "local", state_dir: str | Path = ".flotilla", coordinator: str | None = None
) -> SyncClient:
    """A client of the stack's coordinator; use it in a `with` block or call `close`."""
    return SyncClient(stack, state_dir, coordinator)


class SyncClient:
    """See `Client` for what each method does."""

    def __init__(self, stack: str, state_dir: str | Path, coordinator: str | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flotilla client", daemon=True)
        self._thread.start()

        async def find() -> Client:
            return Client.find(stack, state_dir, coordinator)

        with ExitStack() as unless_connected:
            # Whatever stopped the connection, the thread must not outlive it.
            unless_connected.callback(self._end_thread)
            self._client = self._wait(find())
            unless_connected.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._wait(self._client.close())
        self._end_thread()

    def plan_run(self, files: RunFiles, overrides: Sequence[str] = ()) -> Plan:
        return self._wait(self._client.plan_run(files, overrides))

    def start_run(self, files: RunFiles, overrides: Sequence[str] = ()) -> Run:
        return self._wait(self._client.start_run(files, overrides))

    def open_loop(self, files: RunFiles, overrides: Sequence[str] = ()) -> SyncLoop:
        return self._synchronous(self._wait(self._client.open_loop(files, overrides)))

    def attach_loop(self, run_id: str = "latest") -> SyncLoop:
        return self._synchronous(self._wait(self._client.attach_loop(run_id)))

    def get_run(self, run_id: str = "latest") -> Run:
        return self._wait(self._client.get_run(run_id))

    def list_runs(self, limit: int = 20) -> list[Run]:
        return self._wait(self._client.list_runs(limit))

    def watch_run(self, run_id: str = "latest", after_sequence: int = 0) -> Iterator[RunEvent]:
        return self._iterate(self._client.watch_run(run_id, after_sequence))

    def wait_run(self, run_id: str = "latest") -> Run:
        return self._wait(self._client.wait_run(run_id))

    def stop_run(self, run_id: str = "latest", reason: str = "") -> Run:
        return self._wait(self._client.stop_run(run_id, reason))

    def pause_run(self, run_id: str = "latest") -> Run:
        return self._wait(self._client.pause_run(run_id))

    def set_run(self, run_id: str, changes: Sequence[str]) -> Run:
        return self._wait(self._client.set_run(run_id, changes))

    def resume_run(self, run_id: str = "latest", checkpoint: str = "") -> Run:
        return self._wait(self._client.resume_run(run_id, checkpoint))

    def list_services(self) -> list[pb.Service]:
        return self._wait(self._client.list_services())

    def drain_replica(self, replica: str) -> pb.Service:
        return self._wait(self._client.drain_replica(replica))

    def show_weights(self, run_id: str = "") -> pb.ShowWeightsResponse:
        return self._wait(self._client.show_weights(run_id))

    def list_samples(
        self,
        run_id: str = "latest",
        *,
        step: int | None = None,
        state: pb.SampleState.ValueType = pb.SAMPLE_STATE_UNSPECIFIED,
        limit: int = 100,
        page_token: str = "",
    ) -> pb.ListSamplesResponse:
        page = self._client.list_samples(run_id, step=step, state=state, limit=limit, page_token=page_token)
        return self._wait(page)

    def timeline(self, run_id: str = "latest", *, step: int | None = None) -> Iterator[bytes]:
        return self._iterate(self._client.timeline(run_id, step=step))

    def scale(self, kind: ServiceKind.ValueType, replicas: int) -> list[ProcessStatus]:
        return self._wait(self._client.scale(kind, replicas))

    def _synchronous(self, loop: Loop) -> SyncLoop:
        from flotilla_client.synchronous_loop import SyncLoop

        return SyncLoop(loop, self._wait, lambda reason: self.stop_run(loop.run_id, reason))

    def _wait(self, call: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _iterate(self, items: AsyncGenerator[Result]) -> Iterator[Result]:
        async def following() -> Result:
            return await anext(items, _END)

        try:
            while (item := self._wait(following())) is not _END:
                yield item
        finally:
            self._wait(items.aclose())

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
