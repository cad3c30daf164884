"""Shared parts of the clients without asyncio: how their calls wait, and how they begin and end.

Invariants: one background thread runs one event loop; it ends with `close` or the `with` block. A `with` block of a
training loop that ends by an exception stops the run and says why; one that ends well closes it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flotilla_client.client import Client

if TYPE_CHECKING:
    from flotilla_client.loop import Loop

Result = TypeVar("Result")
_END: Any = object()


class WaitingClient:
    """A `Client` in a background thread."""

    def __init__(
        self,
        stack: str,
        state_dir: str | Path,
        coordinator: str | None,
        credential_file: str | Path | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flotilla client", daemon=True)
        self._thread.start()

        async def find() -> Client:
            return Client.find(stack, state_dir, coordinator, credential_file)

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


class WaitingLoop:
    """A `Loop` in the background thread of the client that opened it."""

    def __init__(
        self, loop: Loop, wait: Callable[[Coroutine[Any, Any, Any]], Any], stop: Callable[[str], Any]
    ) -> None:
        self._loop = loop
        self._wait_for = wait
        self._stop = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stop(f"the client's loop ended with {error!r}")

    def close(self) -> None:
        """End the run well; gradients that wait are dropped."""
        self._wait(self._loop.close())

    def _wait(self, call: Coroutine[Any, Any, Result]) -> Result:
        result: Result = self._wait_for(call)
        return result
