"""The door of a server that asks for a proof.

Invariant: health checks need none, so that anybody may learn whether a service is up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from flotilla_core.errors import FlotillaError
from flotilla_core.rpc.boundary import abort
from flotilla_core.rpc.handlers import is_open_to_all, wrapped
from flotilla_core.trust import HEADER, CallVerifier
from flotilla_core.trust.calls import unproven


class TokenServerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not prove that their caller belongs to the stack."""

    def __init__(self, verifier: CallVerifier) -> None:
        self._verifier = verifier

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or is_open_to_all(method):
            return handler
        refusal = self._refusal(method, handler_call_details)
        if refusal is None:
            return handler
        error = refusal

        async def refuse(_: Any, context: Any) -> None:
            await abort(context, error, method)

        async def refuse_stream(_: Any, context: Any) -> AsyncIterator[Any]:
            await abort(context, error, method)
            return
            yield

        return wrapped(handler, refuse, refuse_stream)

    def _refusal(self, method: str, details: grpc.HandlerCallDetails) -> FlotillaError | None:
        for key, value in details.invocation_metadata or ():
            if key == HEADER:
                return self._verifier.refusal(method, value)
        return unproven(method)
