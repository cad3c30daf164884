"""Fences: a caller that was paused must not act once somebody else has taken its place.

Every beginning of a run has a fence and sends it with each call: the epoch of the coordinator that owns the ledger, the
run, and a number higher than that of any beginning before it. Invariants: a service refuses a call whose epoch is
behind the newest that it has seen of the same ledger, or whose number is behind the newest of the same run; calls of
two runs pass side by side, and calls without a fence (a person's, another stack's) pass.
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
    """A beginning of a run, under one owner of its ledger."""

    ledger: str
    epoch: int
    run: str
    number: int

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with a call."""
        return ((FENCE_HEADER, f"{self.epoch} {self.number} {self.ledger} {self.run}"),)

    @classmethod
    def of_call(cls, details: grpc.HandlerCallDetails) -> Fence | None:
        """The fence that a call carries, if it carries one that can be read."""
        for key, value in details.invocation_metadata or ():
            if key != FENCE_HEADER:
                continue
            match (value.decode() if isinstance(value, bytes) else value).split(" "):
                case [epoch, number, ledger, run] if epoch.isdecimal() and number.isdecimal():
                    return cls(ledger, int(epoch), run, int(number))
        return None


class _Newest:
    """What was seen of one ledger."""

    def __init__(self) -> None:
        self.epoch = 0
        self.numbers: dict[str, int] = {}
        """By run; of this epoch alone, for a later owner begins every run anew."""

    def refusal(self, fence: Fence) -> str:
        """What is behind in a call, which else is the newest from now on; empty where nothing is."""
        if fence.epoch < self.epoch:
            return f"the caller's coordinator, epoch {fence.epoch}, is behind epoch {self.epoch}"
        if fence.epoch > self.epoch:
            self.epoch, self.numbers = fence.epoch, {}
        newest = self.numbers.get(fence.run, 0)
        if fence.number < newest:
            return f"the caller's fence {fence.number} is behind {newest}"
        self.numbers[fence.run] = fence.number
        return ""


class FenceServerInterceptor(grpc.aio.ServerInterceptor):
    """Remembers the newest fences of each ledger and refuses what is behind them."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method, fence = handler_call_details.method, Fence.of_call(handler_call_details)
        if handler is None or fence is None or is_infrastructure(method):
            return handler
        refusal = self._newest.setdefault(fence.ledger, _Newest()).refusal(fence)
        if not refusal:
            return handler
        error = StaleVersion(
            refusal,
            where=method,
            why=f"a later beginning of run {fence.run}, or another coordinator, has taken over from it",
            next_step="see `flotilla run list`",
        )

        async def refuse(_: Any, context: Any) -> None:
            await abort(context, error, method)

        async def refuse_stream(_: Any, context: Any) -> AsyncIterator[Any]:
            await abort(context, error, method)
            yield

        return wrapped(handler, refuse, refuse_stream)
