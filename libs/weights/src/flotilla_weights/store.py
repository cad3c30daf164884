"""The keys and values of one meeting, and the store of torch by which its members ask for them.

A value is kept in one of two ways. What is `set` is the same for all, so every answer brings what was set since the
member's last one, and a member finds it in its own copy. A count, which `add` makes, is asked for each time. A key that
is removed is gone for a member with its next answer.

Invariants: a value that is set once is the same for every member from then on; no question waits longer than its limit;
all questions of a process are asked and answered by one thread, however many wait, and any thread may give one up.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from flotilla.weights.v1 import store_pb2 as pb
from flotilla_core.errors import FlotillaError, InvalidRequest

Result = TypeVar("Result")

_MOST_NEWS_BYTES = 16 << 20
_STARTING = threading.RLock()
"""One that lets a store end while its thread starts work: Python may collect garbage at any moment."""


class StoreError(RuntimeError):
    """Says that a store cannot answer, as torch expects it."""


class Table:
    """The keys and values, where they are kept."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._news: list[pb.News] = []
        self._changed = asyncio.Event()

    async def answer(self, question: pb.AskRequest) -> pb.AskResponse:
        """Change what the question changes, wait for what it awaits, and return the answer."""
        answer = pb.AskResponse(number=len(self._values) + len(self._counts))
        if question.change:
            self._change(question, answer)
        if question.awaited:
            answer.yes = await self._waited(question)
            first = question.awaited[0]
            answer.value = (
                b"%d" % self._counts[first] if first in self._counts else self._values.get(first, b"")
            )
            answer.number = min((self._counts.get(key, 0) for key in question.awaited), default=0)
        nbytes = 0
        for one in self._news[question.heard :]:
            answer.news.append(one)
            nbytes += len(one.value)
            if nbytes > _MOST_NEWS_BYTES:
                break
        return answer

    async def _waited(self, question: pb.AskRequest) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(question.limit_s):
                while not self._has(question):
                    # Each waiter holds the event of its time: a new one for the next change.
                    await self._changed.wait()
        return self._has(question)

    def _has(self, question: pb.AskRequest) -> bool:
        least = question.least if question.HasField("least") else None
        return all(
            key in self._values or (key in self._counts and (least is None or self._counts[key] >= least))
            for key in question.awaited
        )

    def _change(self, question: pb.AskRequest, answer: pb.AskResponse) -> None:
        key, change, held = question.key, question.change, self._values.get(question.key)
        if change == pb.CHANGE_REMOVE:
            answer.yes = self._counts.pop(key, None) is not None or held is not None
            if held is not None:
                del self._values[key]
                self._news.append(pb.News(key=key))
        elif key in (self._values if change == pb.CHANGE_ADD else self._counts):
            raise InvalidRequest(f"{key} is either set or counted, and not both")
        elif change == pb.CHANGE_ADD:
            answer.number = self._counts[key] = self._counts.get(key, 0) + question.number
        elif change == pb.CHANGE_SWAP and (held or b"") != question.expected:
            # As TCPStore does: a key that is not there has no value, which the empty one stands for.
            answer.value = question.expected if held is None else held
        else:
            answer.value = self._values[key] = question.value
            self._news.append(pb.News(key=key, value=question.value))
        self._changed.set()
        self._changed = asyncio.Event()


class EpochStore(Store):
    """The store as torch and the members of a group know it."""

    def __init__(
        self, answer: Callable[[pb.AskRequest], Awaitable[pb.AskResponse]], timeout_s: float
    ) -> None:
        super().__init__()
        self._answer = answer
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._heard = 0

    def start(self, question: pb.AskRequest) -> Future[pb.AskResponse]:
        """Ask, and return at once."""
        return on_thread_of_stores(self._asked(question))

    def ask(self, question: pb.AskRequest, pending: Future[pb.AskResponse] | None = None) -> pb.AskResponse:
        """Return the answer, also of what was started; raise StoreError where there is none."""
        try:
            return (pending or self.start(question)).result()
        except FlotillaError as error:
            raise StoreError(str(error)) from error

    async def _asked(self, question: pb.AskRequest) -> pb.AskResponse:
        question.heard = self._heard
        answer = await self._answer(question)
        # Of two questions at once the later answer may come first.
        for one in answer.news[self._heard - question.heard :]:
            if one.HasField("value"):
                self._values[one.key] = one.value
            else:
                self._values.pop(one.key, None)
        self._heard = max(self._heard, question.heard + len(answer.news))
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self.ask(pb.AskRequest(change=pb.CHANGE_SET, key=key, value=_bytes(value)))

    def get(self, key: str) -> bytes:
        """Return the value, for which it waits."""
        known = self._values.get(key)
        return self._waited([key], self._timeout_s).value if known is None else known

    def add(self, key: str, value: int) -> int:
        return self.ask(pb.AskRequest(change=pb.CHANGE_ADD, key=key, number=value)).number

    def check(self, keys: list[str]) -> bool:
        unknown = self.unknown(keys)
        return not unknown or self.ask(pb.AskRequest(awaited=unknown)).yes

    def unknown(self, keys: Sequence[str]) -> list[str]:
        """Return those keys that are not known to exist."""
        return [key for key in keys if key not in self._values]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if unknown := self.unknown(keys):
            self._waited(unknown, self._timeout_s if timeout is None else timeout.total_seconds())

    def _waited(self, keys: list[str], limit_s: float) -> pb.AskResponse:
        answer = self.ask(pb.AskRequest(awaited=keys, limit_s=limit_s))
        if not answer.yes:
            raise StoreError(f"no {' or '.join(keys)[:200]} in the store within {limit_s:g} s")
        return answer

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, value = _bytes(expected_value), _bytes(desired_value)
        return self.ask(pb.AskRequest(change=pb.CHANGE_SWAP, key=key, expected=expected, value=value)).value

    def delete_key(self, key: str) -> bool:
        return self.ask(pb.AskRequest(change=pb.CHANGE_REMOVE, key=key)).yes

    def num_keys(self) -> int:
        return self.ask(pb.AskRequest()).number

    def clone(self) -> EpochStore:
        """Return itself: any thread may ask it."""
        return self


def on_thread_of_stores(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Start work on the thread of all stores of this process."""
    with _STARTING:
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(work, loop)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="weights-store", daemon=True).start()
    return loop


# A fork has none of its parent's threads.
os.register_at_fork(after_in_child=_loop.cache_clear)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
