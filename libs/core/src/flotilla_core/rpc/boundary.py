"""The edge of every servicer: bytes become messages, exceptions become statuses.

Invariants: a servicer raises `FlotillaError` and never touches status codes; bytes that are no message are
the caller's error and tell nothing of our insides; an exception that nobody expected is logged once, here,
and travels as INTERNAL with its traceback; a call that answers once has a deadline: nothing waits for ever.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from flotilla_core.errors import FlotillaError, Internal, InvalidRequest, Unimplemented
from flotilla_core.rpc import status
from flotilla_core.rpc.handlers import behavior_of, is_infrastructure, wrapped

logger = structlog.get_logger()

GENERATED = "_pb2_grpc"
"""How the modules are called whose base classes hold a place for every call of a contract."""


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """The innermost interceptor of every server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        # gRPC answers UNIMPLEMENTED for an unknown method, for which there is no handler.
        if handler is None or is_infrastructure(handler_call_details.method):
            return handler
        return _bounded(handler, handler_call_details.method)


def _bounded(handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    answer = _answering(handler, method)

    async def respond(request: Any, context: Any) -> Any:
        try:
            if context.time_remaining() is None:
                raise InvalidRequest(
                    "the call has no deadline", where=method, next_step="Set one; nothing may wait for ever."
                )
            return await answer(request, context)
        except grpc.aio.AbortError:
            raise
        # The boundary of the service: whatever a handler raises ends here, as a status.
        except Exception as error:  # noqa: BLE001
            await abort(context, error, method)

    async def respond_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            responses = answer(request, context)
            if inspect.isawaitable(responses):
                await responses  # A handler in coroutine style writes through the context.
                return
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        # The boundary of the service, as above.
        except Exception as error:  # noqa: BLE001
            await abort(context, error, method)

    return wrapped(handler, respond, respond_stream)


def _answering(handler: Any, method: str) -> Callable[[Any, Any], Any]:
    """The behaviour of `handler`, taking raw bytes; a refusal where the servicer left the call to its base class."""
    behavior = behavior_of(handler)

    def decoded(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except (DecodeError, ValueError):
            raise InvalidRequest("the request is not a valid message", where=method) from None

    async def decoded_stream(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in stream:
            yield decoded(data)

    def answer(request: Any, context: Any) -> Any:
        return behavior(decoded_stream(request) if handler.request_streaming else decoded(request), context)

    def refuse(request: Any, context: Any) -> Any:
        raise Unimplemented("this service does not offer the call", where=method)

    is_offered = not behavior.__module__.endswith(GENERATED)
    return answer if is_offered else refuse


async def abort(context: Any, error: Exception, method: str) -> NoReturn:
    """End the call with `error`; anything but a FlotillaError is a defect and is logged."""
    trace = ""
    if isinstance(error, FlotillaError):
        known = error
    else:
        trace = "".join(traceback.format_exception(error))
        known = Internal("the service failed", where=method, why=f"{type(error).__name__}: {error}")
        logger.error("call failed unexpectedly", method=method, traceback=trace)
    ending = rpc_status.to_status(status.encode(known, traceback=trace))
    await context.abort(ending.code, ending.details, ending.trailing_metadata)
    raise AssertionError("abort returned")
