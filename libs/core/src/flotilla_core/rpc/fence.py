"""Fences: a caller that was paused must not act once somebody else has taken its place.

Every beginning of a run has a fence, higher than any before it in its ledger, and sends it with each call. Invariant: a
service refuses a call whose fence is lower than one that it has seen of the same ledger; calls without a fence (a
person's, another stack's) pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from flotilla_core.errors import StaleVersion
from flotilla_core.rpc.boundary import abort
from flotilla_core.rpc.handlers import is_infrastructure, wrapped

FENCE_HEADER = "flotilla-fence"


@dataclass(frozen=True)
class Fence:
    """A beginning among all those of one ledger."""

    ledger: str
    number: int

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with a call."""
        return ((FENCE_HEADER, f"{self.number} {self.ledger}"),)

    @classmethod
    def of_call(cls, details: grpc.HandlerCallDetails) -> Fence | None:
        """The fence that a call carries, if it carries one that can be read."""
        for key, value in details.invocation_metadata or ():
            number, _, ledger = (value.decode() if isinstance(value, bytes) else value).partition(" ")
            if key == FENCE_HEADER and number.isdecimal():
                return cls(ledger, int(number))
        return None


class FenceServerInterceptor(grpc.aio.ServerInterceptor):
    """Remembers the newest fence of each ledger and refuses what is behind it."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method, fence = handler_call_details.method, Fence.of_call(handler_call_details)
        if handler is None or fence is None or is_infrastructure(method):
            return handler
        newest = self._newest[fence.ledger] = max(fence.number, self._newest.get(fence.ledger, 0))
        if fence.number == newest:
            return handler
        error = StaleVersion(
            f"the caller's fence {fence.number} is behind {newest}",
            where=method,
            why="a later beginning of the run, or another run, has taken over from it",
            next_step="see `flotilla run list`",
        )

        async def refuse(_: Any, context: Any) -> None:
            await abort(context, error, method)

        async def refuse_stream(_: Any, context: Any) -> AsyncIterator[Any]:
            await abort(context, error, method)
            yield

        return wrapped(handler, refuse, refuse_stream)
