"""One session: the requests of one agent for one episode, which are answered one after the other.

Invariants: each request that is no repetition of another becomes one turn, in the order of arrival. A repetition gets
the turn of the request that it repeats, and no second one is sampled: what shows one is the client's mark, or that the
connection of the first was lost before its answer was delivered. A request that nobody waits for is never asked. The
requests that wait are bounded in number and bytes. Once the session is over, each is told why.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flotilla_core.errors import Exhausted, FailedPrecondition, FlotillaError, InvalidRequest
from flotilla_environment.gateway.dialect import Completed, Completion

MOST_WAITING = 64
"""Requests of one session that wait, or are answered, at the same time."""
MOST_WAITING_BYTES = 64 << 20
MOST_KEPT = 64
"""Answers of one session that are kept for repetitions."""
KEY_BYTES = 24


@dataclass(frozen=True)
class Request:
    """A request for a turn, as it came."""

    completion: Completion
    model: str
    digest: str
    """Equal for equal paths and bodies."""
    size: int
    mark: str = ""
    """The key by which the client names a request and its repetitions; empty where it names none."""
    repeats: bool = False
    """True where the client says that it sends the request again."""

    @classmethod
    def of(cls, completion: Completion, model: str, path: str, body: bytes, **marks: Any) -> Request:
        digest = hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()
        return cls(completion, model, digest, len(body), **marks)


@dataclass(eq=False)
class Ask:
    """A turn that is asked for, by a request and its repetitions."""

    request: Request
    answer: asyncio.Future[Completed] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    waiting: int = 0
    """The connections that wait for it."""
    begun: bool = False
    delivered: bool = False

    @property
    def failed(self) -> bool:
        """Whether there is a reason why it has no answer."""
        return self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)

    @contextmanager
    def awaited(self) -> Iterator[asyncio.Future[Completed]]:
        """Wait for the turn, as one connection."""
        self.waiting += 1
        try:
            yield self.answer
        finally:
            self.waiting -= 1


class Session:
    """The requests and rewards of one agent, for one episode."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.id = secrets.token_hex(12)
        self.key = f"flotilla-{secrets.token_urlsafe(KEY_BYTES)}"
        self.turns_key = f"flotilla-{secrets.token_urlsafe(KEY_BYTES)}"
        """Asks for turns, and for nothing else: not for rewards either."""
        self.task = task
        self.rewards: dict[str, float] = {}
        """The rewards that the agent gave, by name."""
        self.given: frozenset[str] = frozenset()
        """The names of rewards that the run itself gives."""
        self.taken_by = b""
        """The hash of the key of the agent that took the task; empty where it has a process of its own."""
        self.failure = ("", "")
        """The failure that the agent tells at its end, and its traceback; empty where nothing failed."""
        self.ended = asyncio.Event()
        """The agent says that it has done its task."""
        self.answered = 0
        """The turns so far."""
        self._over: FlotillaError | None = None
        self._queue: list[Ask] = []
        self._arrived = asyncio.Event()
        self._kept: dict[str, Ask] = {}
        """The last asks, by the digests and marks of their requests."""

    def ask(self, request: Request) -> Ask:
        """Return the turn that answers a request: that of an earlier one where it is its repetition."""
        earlier = self._that_is_repeated(request)
        if earlier is not None and not earlier.failed:
            return earlier
        self.check()
        if len(self._queue) >= MOST_WAITING or self._waiting_bytes + request.size > MOST_WAITING_BYTES:
            raise Exhausted(
                "too many requests of this session wait",
                why=f"{len(self._queue)} of at most {MOST_WAITING}, with {self._waiting_bytes >> 20} of at most "
                f"{MOST_WAITING_BYTES >> 20} MiB; they are answered one after the other",
            )
        ask = Ask(request)
        self._queue.append(ask)
        for key in filter(None, (request.digest, request.mark)):
            self._kept.pop(key, None)
            self._kept[key] = ask
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._arrived.set()
        return ask

    def _that_is_repeated(self, request: Request) -> Ask | None:
        if request.mark and (marked := self._kept.get(request.mark)) is not None:
            if marked.request.digest != request.digest:
                field = "Idempotency-Key"
                raise InvalidRequest(f"{field}: another request of this session has it", where=field)
            return marked
        known = self._kept.get(request.digest)
        # While somebody waits for the first, an equal request is a further sample: agents ask for several at once.
        if known is not None and (request.repeats or not (known.delivered or known.waiting)):
            return known
        return None

    @property
    def _waiting_bytes(self) -> int:
        return sum(ask.request.size for ask in self._queue)

    async def next(self) -> Ask:
        """Return the next turn that somebody waits for."""
        while True:
            for ask in [*self._queue]:
                if not ask.begun and not ask.waiting:
                    self._forget(ask)
            first = next((one for one in self._queue if not one.begun), None)
            if first is not None:
                first.begun = True
                return first
            self._arrived.clear()
            await self._arrived.wait()

    def _forget(self, ask: Ask) -> None:
        """Ask no turn that nobody waits for; a repetition of its request is a new one."""
        self._queue.remove(ask)
        ask.answer.cancel()
        self._kept = {key: kept for key, kept in self._kept.items() if kept is not ask}

    def answer(self, ask: Ask, done: Completed) -> None:
        """Give the turn to all that wait for it."""
        self._queue.remove(ask)
        self.answered += 1
        if not ask.answer.done():
            ask.answer.set_result(done)

    def refuse(self, ask: Ask, error: FlotillaError) -> None:
        """Tell all that wait for a turn why there is none."""
        self._queue.remove(ask)
        if not ask.answer.done():
            ask.answer.set_exception(error)
            ask.answer.exception()  # Nobody may wait for it any more.

    def check(self) -> None:
        """Raise the reason why nothing can be asked for any more."""
        if self._over is not None:
            raise self._over.again()

    def close(self, why: str) -> None:
        """End it; whoever waits, or asks from now on, is told why."""
        if self._over is None:
            self._over = FailedPrecondition("the session is over", why=why)
        for ask in [*self._queue]:
            self.refuse(ask, self._over.again())
