"""Calls with deadlines, retries and typed errors.

Invariants: every call ends: after `timeout_s` in all its attempts together, or when a stream is silent for
its idle timeout. Only `Unavailable` is sent again, with the same request, so a request that must not act
twice carries a request_id. Errors are `FlotillaError`; a caller's own cancellation stays a cancellation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any, TypeVar

import grpc

from flotilla_core.errors import DeadlineExceeded, FlotillaError, Unavailable
from flotilla_core.rpc import status
from flotilla_core.telemetry.grpc import ATTEMPT_METADATA

Request = TypeVar("Request")
Response = TypeVar("Response")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


async def unary(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    timeout_s: float,
    attempts: int = 4,
) -> Response:
    """Call `method`; while the peer is away, again after a growing pause, within `timeout_s` in all."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    attempt = 1
    while True:
        metadata = ((ATTEMPT_METADATA, str(attempt)),) if attempt > 1 else None
        try:
            return await method(request, timeout=max(0.0, deadline - loop.time()), metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            error = _typed(failure, method, timeout_s)
        except grpc.aio.UsageError:
            raise _channel_closed(method) from None  # before the call: it stays closed
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            error = _channel_closed(method)
        if not isinstance(error, Unavailable) or attempt >= attempts:
            raise await _explained(error, method)
        pause_s = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
        if loop.time() + pause_s >= deadline:
            raise await _explained(error, method)
        await asyncio.sleep(pause_s)
        attempt += 1


def server_stream(
    method: grpc.aio.UnaryStreamMultiCallable[Request, Response],
    request: Request,
    *,
    idle_timeout_s: float,
    timeout_s: float | None = None,
) -> AsyncGenerator[Response]:
    """Yield the responses as they come; closing the iterator (`contextlib.aclosing`) cancels the call."""
    return _responses(method, request, idle_timeout_s, timeout_s)


def duplex(
    method: grpc.aio.StreamStreamMultiCallable[Request, Response],
    requests: AsyncIterable[Request],
    *,
    idle_timeout_s: float | None,
) -> AsyncGenerator[Response]:
    """Send the requests as they come, and yield the responses as they come; closing the iterator cancels the call.

    Without `idle_timeout_s` the requests have to end, also where nothing comes.
    """
    return _responses(method, requests, idle_timeout_s, None)


async def _responses(
    method: Any, sent: Any, idle_timeout_s: float | None, timeout_s: float | None
) -> AsyncGenerator[Any]:
    try:
        call = method(sent, timeout=timeout_s)
    except grpc.aio.UsageError:
        raise _channel_closed(method) from None
    responses = aiter(call)
    # The call's own deadline comes first: no need for a timer a message.
    bounded = idle_timeout_s is not None and timeout_s is not None and timeout_s <= idle_timeout_s
    idle_limit_s = None if bounded else idle_timeout_s
    count = 0
    try:
        while True:
            try:
                if idle_limit_s is None:
                    response = await anext(responses)
                else:
                    async with asyncio.timeout(idle_limit_s):
                        response = await anext(responses)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(
                    f"nothing came for {idle_limit_s:g} s",
                    where=_name_of(method),
                    why=f"the stream is silent after {count} messages",
                ) from None
            except grpc.aio.AioRpcError as failure:
                raise await _explained(_typed(failure, method, timeout_s), method) from None
            except asyncio.CancelledError:
                if _task_is_cancelled():
                    raise
                raise _channel_closed(method) from None
            count += 1
            yield response
    finally:
        call.cancel()


async def client_stream(
    method: grpc.aio.StreamUnaryMultiCallable[Request, Response],
    requests: AsyncIterable[Request],
    *,
    timeout_s: float,
) -> Response:
    """Send `requests` one after the other and return the answer. Never retried: the requests are gone."""
    broken: list[Exception] = []

    async def guarded() -> AsyncIterator[Request]:
        # gRPC swallows what the iterator raises and only cancels the call: keep it for the caller.
        try:
            async for request in requests:
                yield request
        # An iterator may raise anything; it is raised again, here and to the caller.
        except Exception as error:
            broken.append(error)
            raise

    try:
        call = method(guarded(), timeout=timeout_s)
    except grpc.aio.UsageError:
        raise _channel_closed(method) from None
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        if broken:
            raise broken[0] from None
        raise _typed(failure, method, timeout_s) from None
    except asyncio.CancelledError:
        if broken:
            raise broken[0] from None
        if _task_is_cancelled():
            raise
        raise _channel_closed(method) from None
    finally:
        call.cancel()


def _task_is_cancelled() -> bool:
    """Return whether this task is being cancelled; gRPC raises CancelledError for its own reasons as well."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _channel_closed(method: Any) -> Unavailable:
    return Unavailable("the channel to the peer is closed", where=_name_of(method))


def _typed(failure: grpc.aio.AioRpcError, method: Any, timeout_s: float | None) -> FlotillaError:
    name = _name_of(method)
    if timeout_s is not None and status.is_own_deadline(failure):
        return DeadlineExceeded(f"no answer within {timeout_s:g} s", where=name)
    return status.decode(failure, name)


async def _explained(error: FlotillaError, method: Any) -> FlotillaError:
    """Return the error, or one that says more where the channel knows why it has no connection."""
    explain = getattr(method, "explain", None)
    if explain is None or not isinstance(error, Unavailable):
        return error
    explained: FlotillaError = await explain(error)
    return explained


def _name_of(method: Any) -> str:
    # The stub's callable knows its name, but offers no public way to ask.
    name = getattr(method, "_method", b"call")
    return name.decode() if isinstance(name, bytes) else str(name)
