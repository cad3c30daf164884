"""Rebuild a method handler around another behaviour, whatever its kind.

Invariant: what comes out takes raw request bytes, so only the innermost interceptor decodes a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

# Requests, responses and contexts of any method pass through here: their types belong to the servicers.
Respond = Callable[[Any, Any], Awaitable[Any]]
RespondStream = Callable[[Any, Any], AsyncIterator[Any]]


def behavior_of(handler: Any) -> Callable[[Any, Any], Any]:
    """Return the only behaviour that `handler` has."""
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary  # type: ignore[no-any-return]
    return handler.unary_stream if handler.response_streaming else handler.unary_unary  # type: ignore[no-any-return]


def wrapped(handler: Any, respond: Respond, respond_stream: RespondStream) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind that answers with `respond`, or with `respond_stream` if it streams."""
    serializer = handler.response_serializer
    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(respond_stream, None, serializer)
        return grpc.stream_unary_rpc_method_handler(respond, None, serializer)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(respond_stream, None, serializer)
    return grpc.unary_unary_rpc_method_handler(respond, None, serializer)
