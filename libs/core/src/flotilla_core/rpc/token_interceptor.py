"""The door of a server that asks for the stack's token.

Invariants: a token is compared in constant time; health checks need none, so that anybody may learn whether a
service is up.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from flotilla_core.errors import Unauthenticated
from flotilla_core.rpc.auth import TOKEN_HEADER
from flotilla_core.rpc.boundary import abort
from flotilla_core.rpc.handlers import is_open_to_all, wrapped


class TokenServerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or is_open_to_all(method) or self._carries_token(handler_call_details):
            return handler
        error = Unauthenticated(
            "the call carries no valid token",
            where=method,
            why="this stack asks for one",
            next_step="Name the stack's token file in bind.token_file.",
        )

        async def refuse(_: Any, context: Any) -> None:
            await abort(context, error, method)

        async def refuse_stream(_: Any, context: Any) -> AsyncIterator[Any]:
            await abort(context, error, method)
            yield

        return wrapped(handler, refuse, refuse_stream)

    def _carries_token(self, details: grpc.HandlerCallDetails) -> bool:
        for key, value in details.invocation_metadata or ():
            given = value.encode() if isinstance(value, str) else value
            if key == TOKEN_HEADER and hmac.compare_digest(given, self._expected):
                return True
        return False
