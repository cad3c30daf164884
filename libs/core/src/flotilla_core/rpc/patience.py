"""Waits for an answer that may take hours, for as long as the peer makes progress.

Invariants: such an answer has no limit in total. Over the channel of the call the peer is asked again and again what it
does, and every change of that is progress. Without progress for `idle_timeout_s`, also because the peer says nothing,
the call is cancelled, with an error that names what the peer did last. A caller that is cancelled cancels the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from flotilla.common.v1.operate_pb2 import GetActivityRequest
from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla_core.errors import DeadlineExceeded, FlotillaError
from flotilla_core.rpc.calls import unary

LOOK_EVERY_S = 2.0
LOOK_TIMEOUT_S = 10.0
UNLIMITED_S = 30 * 86_400.0
"""The deadline of a call that is waited for with patience: gRPC wants one, and no call comes near it."""

T = TypeVar("T")


def _to_nobody(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Patience:
    """Waits for the answers of one peer."""

    channel: grpc.aio.Channel | None
    """The channel to ask the peer what it does; None where it cannot be asked, so that nothing counts as progress."""
    run_id: str = ""
    """The run of the wait: what the peer does for it is progress."""
    tell: Callable[[str], None] = _to_nobody
    """Called with what the peer does, whenever that changed, and with nothing when the wait is over."""

    async def answer(self, call: Awaitable[T], *, idle_timeout_s: float, where: str) -> T:
        """Return the answer of a call; raise when the peer makes no progress for too long."""
        task = asyncio.ensure_future(call)
        said: tuple[str, ...] = ()
        moved_at = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_EVERY_S))[0]:
                doing = await self._doing()
                if doing and doing != said:
                    said, moved_at = doing, time.monotonic()
                    self.tell(doing[-1])
                elif time.monotonic() - moved_at > idle_timeout_s:
                    raise DeadlineExceeded(
                        f"no answer, and no progress for {idle_timeout_s:g} s",
                        where=where,
                        why=f"the last that it did: {said[-1]}" if said else "it did not say what it does",
                    )
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if said:
                self.tell("")

    async def _doing(self) -> tuple[str, ...]:
        """Return what the peer does for the run, the newest last; nothing where it does not answer."""
        if self.channel is None:
            return ()
        look = OperateServiceStub(self.channel).GetActivity
        try:
            reply = await unary(look, GetActivityRequest(), timeout_s=LOOK_TIMEOUT_S, attempts=1)
        except FlotillaError:
            return ()
        return tuple(one.what for one in reply.activities if one.run_id == self.run_id)
