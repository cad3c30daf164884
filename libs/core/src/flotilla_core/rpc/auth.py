"""The bearer token of a stack.

Invariants: an address beyond loopback is never served without a token; a token is compared in constant time;
health checks need none, so that anybody may learn whether a service is up.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from flotilla_core.errors import InvalidConfig, Unauthenticated
from flotilla_core.rpc.boundary import abort
from flotilla_core.rpc.handlers import is_open_to_all, wrapped

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

_HEADER = "authorization"


def read_token(bind: BindConfig) -> str | None:
    """The stack's token, or None on a loopback stack without one."""
    if bind.token_file is None:
        require_token(bind, None)
        return None
    try:
        token = bind.token_file.read_text().strip()
    except OSError as error:
        raise InvalidConfig(
            "cannot read the stack's token",
            where=f"bind.token_file {bind.token_file}",
            why=str(error.strerror),
        ) from error
    if not token:
        raise InvalidConfig("the stack's token is empty", where=f"bind.token_file {bind.token_file}")
    return token


def require_token(bind: BindConfig, token: str | None) -> None:
    """Raise InvalidConfig for an address beyond loopback without a token."""
    if token is None and not is_loopback(bind.host):
        raise InvalidConfig(
            "bind.token_file is not set",
            where=f"bind.host {bind.host}",
            why="an address beyond loopback is never served without a token",
            next_step="Write a random token to a file (mode 0600) and name it in bind.token_file, "
            "or bind to 127.0.0.1.",
        )


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine alone."""
    if host.startswith("unix:"):
        return True  # A socket file: its directory's permissions decide who may connect.
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


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
            if key == _HEADER and hmac.compare_digest(given, self._expected):
                return True
        return False


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a caller sends with every call."""
    return ((_HEADER, f"Bearer {token}"),)
