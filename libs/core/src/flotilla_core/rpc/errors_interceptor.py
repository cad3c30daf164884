"""The edge of every servicer: callers are known, bytes become messages, exceptions become statuses.

Invariants: who may not make a call is refused before anything of it is looked at, and only its span remains; a servicer
raises `FlotillaError` and never touches status codes; bytes that are no message are the caller's error and reveal no
internals, and so is a message that breaks the rules of its contract (`validation`); an unexpected exception is logged
once, here, and travels as INTERNAL with its traceback; a call that answers once has a deadline: nothing waits without
limit. A call's fence is admitted last, right before the handler: a call that is refused here moves no fence.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from flotilla_core.errors import FlotillaError, Internal, InvalidRequest, Unimplemented
from flotilla_core.logger import get_logger
from flotilla_core.method_handlers import behavior_of, wrapped
from flotilla_core.rpc import status
from flotilla_core.rpc.fence import FENCE_HEADER, Fence, NewestFences
from flotilla_core.rpc.validation import validate
from flotilla_core.trust.refusals import RefusalLog
from flotilla_core.trust.roles import refusal

logger = get_logger()

_REFUSED_STREAM_S = 2.0
_INFRASTRUCTURE = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Services of gRPC itself, which foreign tools call in their own ways."""
GENERATED = "_pb2_grpc"
"""The ending of the names of the modules whose base classes hold a place for every call of a contract."""


class ErrorsInterceptor(grpc.aio.ServerInterceptor):
    """The innermost interceptor of every server."""

    def __init__(self, *, knows_callers: bool) -> None:
        """`knows_callers` says that each connection has shown a certificate, whose names say what the caller may do."""
        self._fences = NewestFences()
        self._refusals = RefusalLog() if knows_callers else None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        # gRPC answers UNIMPLEMENTED for an unknown method, for which there is no handler.
        if handler is None:
            return handler
        return _bounded(handler, _Reception(handler, handler_call_details, self._fences, self._refusals))


class _Reception:
    """The checks of one call before its handler sees it."""

    def __init__(
        self,
        handler: Any,
        details: grpc.HandlerCallDetails,
        fences: NewestFences,
        refusals: RefusalLog | None,
    ) -> None:
        self.method = details.method
        self._refusals = refusals
        self._handler = handler
        self._details = details
        self._fences = fences

    async def received(self, request: Any, context: Any) -> Any:
        """Return the message, or the stream of messages, of a call that may reach its handler; raise otherwise."""
        if self._refusals is not None:
            await self._admit(request, context, self._refusals)
        if behavior_of(self._handler).__module__.endswith(GENERATED):
            raise Unimplemented("this service does not offer the call", where=self.method)
        if (
            not self._handler.response_streaming
            and context.time_remaining() is None
            and not self.method.startswith(_INFRASTRUCTURE)
        ):
            raise InvalidRequest(
                "the call has no deadline",
                where=self.method,
                next_step="Set one: no call may wait without a limit.",
            )
        fence = Fence.of_call(self._details)
        if self._handler.request_streaming:
            return await self._opened(request, fence)
        message = self._decoded(request)
        self._admit_fence(fence)
        return message

    def _admit_fence(self, fence: Fence | None) -> None:
        if fence is not None:
            self._fences.admit(fence, self.method)

    async def _admit(self, request: Any, context: Any, refusals: RefusalLog) -> None:
        """Raise where the names of the caller's certificate do not allow the call."""
        fenced = any(key == FENCE_HEADER for key, _ in self._details.invocation_metadata or ())
        error = refusal(context.auth_context(), self.method, fenced=fenced)
        if error is None:
            return
        refusals.tell(context.peer(), error)
        if self._handler.request_streaming and self._handler.response_streaming:
            await read_to_its_end(request)
        raise error

    async def _opened(self, request: AsyncIterator[bytes], fence: Fence | None) -> AsyncIterator[Any]:
        """Return the messages of a stream whose first one is valid; each of them may come too late for its fence."""
        stream = aiter(request)
        data = await anext(stream, None)
        first = None if data is None else await self._taken(data, fence, stream)

        async def messages() -> AsyncIterator[Any]:
            if first is None:
                return
            yield first
            async for data in stream:
                yield await self._taken(data, fence, stream)

        return messages()

    async def _taken(self, data: bytes, fence: Fence | None, stream: AsyncIterator[bytes]) -> Any:
        """Return a message of a stream; a caller whose message is refused may still send others."""
        try:
            message = self._decoded(data)
            self._admit_fence(fence)
        except FlotillaError:
            await read_to_its_end(stream)
            raise
        return message

    def _decoded(self, data: bytes) -> Any:
        try:
            message = self._handler.request_deserializer(data)
        except (DecodeError, ValueError):
            raise InvalidRequest("the request is not a valid message", where=self.method) from None
        if isinstance(message, Message):
            validate(message, self.method)
        return message


def _bounded(handler: Any, reception: _Reception) -> grpc.RpcMethodHandler[Any, Any]:
    behavior, method = behavior_of(handler), reception.method

    async def respond(request: Any, context: Any) -> Any:
        try:
            return await behavior(await reception.received(request, context), context)
        except grpc.aio.AbortError:
            raise
        # The boundary of the service: whatever a handler raises ends here, as a status.
        except Exception as error:  # noqa: BLE001
            if handler.request_streaming:
                await read_to_its_end(request)
            await abort(context, error, method)

    async def respond_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            responses = behavior(await reception.received(request, context), context)
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


async def read_to_its_end(request: AsyncIterator[bytes]) -> None:
    """Read for a short time what a refused caller still sends, and ignore it.

    A Python client that writes when the refusal arrives tells its caller of an internal error in place of the refusal
    (grpc issue 36066).
    """
    try:
        async with asyncio.timeout(_REFUSED_STREAM_S):
            async for _ in request:
                pass
    except (TimeoutError, grpc.aio.BaseError):
        pass  # The caller receives its refusal all the same.


async def abort(context: Any, error: Exception, method: str) -> None:
    """End the call with `error`; anything but a FlotillaError is a defect and is logged. The handler returns then."""
    trace = ""
    if isinstance(error, FlotillaError):
        known = error
    else:
        trace = "".join(traceback.format_exception(error))
        known = Internal("the service failed", where=method, why=f"{type(error).__name__}: {error}")
        logger.error("call failed unexpectedly", method=method, traceback=trace)
    ending = rpc_status.to_status(status.encode(known, traceback=trace))
    try:
        await context.abort(ending.code, ending.details, ending.trailing_metadata)
    except grpc.aio.AbortError as aborted:
        # gRPC keeps this exception with the call, and raises it once the handler has returned. The frames of its
        # traceback hold the call, and with it the request: such a circle stays until a full garbage collection.
        aborted.__traceback__ = aborted.__context__ = None
