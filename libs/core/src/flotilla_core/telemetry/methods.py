"""What both interceptors know about a call: its span name, its attempt, the names of status codes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import grpc
from opentelemetry.trace import Span

from flotilla_core.telemetry import names

STATUS_NAMES = {code: code.name for code in grpc.StatusCode}

ATTEMPT_METADATA = "flotilla-attempt"
"""Sent by our own retries, 2 from the second try on."""
_TRANSPARENT_RETRIES = "grpc-previous-rpc-attempts"


@functools.lru_cache(maxsize=1024)
def span_name(method: str | bytes) -> str | None:
    """`package.Service/Method` of a full method name, or None where the method is not traced."""
    full = method.decode() if isinstance(method, bytes) else method
    if full in names.UNTRACED_METHODS or full.startswith(names.UNTRACED_PREFIXES):
        return None
    return full.removeprefix("/")


def attempt_of(metadata: Iterable[tuple[str, Any]]) -> int:
    """Which try of its call this is, from 1 on: our own retries and those of the channel together."""
    attempt = 1
    for key, value in metadata:
        if key == ATTEMPT_METADATA:
            attempt += int(value) - 1
        elif key == _TRANSPARENT_RETRIES:
            attempt += int(value)
    return attempt


def note_attempt(span: Span, attempt: int) -> None:
    """Leave an event on the span of a call that is not the first try."""
    if attempt > 1:
        span.add_event(names.RETRY_EVENT, {names.ATTEMPT: attempt})
