"""A partition that can be switched on and off: a TCP proxy that stops passing bytes on.

Invariants: while it is cut nothing is lost and nothing is closed, bytes wait (as in a network that drops packets, whose
peers send again); connections that are opened meanwhile are accepted and stay silent; it works on a thread of its own,
so the test may block.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

CHUNK = 1 << 16


class TcpProxy:
    """Listens at one address and passes on to another."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._listen, self._target = listen, target
        self._loop = asyncio.new_event_loop()
        self._there = asyncio.Event()
        self._back = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp proxy", daemon=True)
        self.port = listen[1]

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self, *, there: bool = True, back: bool = True) -> None:
        """Pass nothing on to the target, nothing back from it, or neither."""
        for direction, is_cut in ((self._there, there), (self._back, back)):
            self._loop.call_soon_threadsafe(direction.clear if is_cut else direction.set)

    def heal(self) -> None:
        """Pass everything on, what waited first."""
        self.cut(there=False, back=False)

    async def _open(self) -> int:
        self._there.set()
        self._back.set()
        self._server = await asyncio.start_server(self._connected, *self._listen)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._there.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        for one, other, direction in (
            (reader, far_writer, self._there),
            (far_reader, writer, self._back),
        ):
            task = asyncio.create_task(_pass_on(one, other, direction))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
    try:
        while chunk := await reader.read(CHUNK):
            await flows.wait()
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass  # one side has gone: the other learns of it below
    finally:
        writer.close()
