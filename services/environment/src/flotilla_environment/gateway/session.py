"""One session: the requests of one agent for one episode, which are answered one after the other.

Invariants: each request that is no repetition of another becomes one turn, in the order of arrival. A repetition gets
the turn of the request that it repeats, and no second one is sampled: what shows one is the client's mark, or that the
connection of the first was lost before its answer was delivered. What repeats a request that was refused is a new one.
A request that nobody waits for is never asked. The requests that wait are bounded in number and bytes, and none of them
is forgotten. Once the session is over, each is told why.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    def lost(self) -> bool:
        """Whether its answer reached nobody, and nobody waits for it any more."""
        return not self.delivered and not self.waiting

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
        self.of_system: tuple[int, str] | None = None
        """The number and the path of the system's error that the failure is."""
        self.ended = asyncio.Event()
        """The agent says that it has done its task."""
        self.answered = 0
        """The turns so far."""
        self.refused = 0
        """The requests so far that were refused for want of room, and whose repetitions have not come."""
        self._over: FlotillaError | None = None
        self._asks: list[Ask] = []
        """Those without an answer, and the last ones with one, in the order of their arrival."""
        self._arrived = asyncio.Event()

    def ask(self, request: Request) -> Ask:
        """Return the turn that answers a request: that of an earlier one where it is its repetition."""
        earlier = self._that_is_repeated(request)
        if earlier is not None:
            return earlier
        self.check()
        waiting = self._waiting
        size = sum(ask.request.size for ask in waiting)
        if len(waiting) >= MOST_WAITING or size + request.size > MOST_WAITING_BYTES:
            self.refused += not request.mark
            raise Exhausted(
                "too many requests of this session wait",
                why=f"{len(waiting)} of at most {MOST_WAITING}, with {size >> 20} of at most "
                f"{MOST_WAITING_BYTES >> 20} MiB; they are answered one after the other",
            )
        ask = Ask(request)
        self._asks.append(ask)
        self._arrived.set()
        return ask

    def _that_is_repeated(self, request: Request) -> Ask | None:
        if request.mark:
            marked = next((ask for ask in self._asks if ask.request.mark == request.mark), None)
            if marked is not None and marked.request.digest != request.digest:
                field = "Idempotency-Key"
                raise InvalidRequest(f"{field}: another request of this session has it", where=field)
            return marked
        equal = [ask for ask in self._asks if (ask.request.digest, ask.request.mark) == (request.digest, "")]
        # While somebody waits for the first, an equal request is a further sample: agents ask for several at once.
        lost = next((ask for ask in equal if ask.lost), None)
        if lost is not None or not request.repeats:
            return lost
        if self.refused:
            self.refused -= 1
            return None
        # The client lost what was sent, or its connection is lost and nobody has noticed that yet.
        delivered = [ask for ask in equal if ask.delivered]
        return delivered[-1] if delivered else next(iter(equal), None)

    @property
    def _waiting(self) -> list[Ask]:
        """The asks without an answer."""
        return [ask for ask in self._asks if not ask.answer.done()]

    async def next(self) -> Ask:
        """Return the next turn that somebody waits for."""
        while True:
            for ask in self._waiting:
                if ask.begun:
                    continue
                if ask.waiting:
                    ask.begun = True
                    return ask
                self._asks.remove(ask)  # A repetition of its request is a new one.
                ask.answer.cancel()
            self._arrived.clear()
            await self._arrived.wait()

    def answer(self, ask: Ask, done: Completed) -> None:
        """Give the turn to all that wait for it; nobody does where the session was closed while it was written."""
        if ask.answer.done():
            return
        ask.answer.set_result(done)
        # It is known by its digest from now on, and histories may be long.
        ask.request = replace(ask.request, completion=Completion(()))
        self.answered += 1
        answered = [one for one in self._asks if one.answer.done()]
        if len(answered) > MOST_KEPT:
            self._asks.remove(answered[0])

    def refuse(self, ask: Ask, error: FlotillaError) -> None:
        """Tell all that wait for a turn why there is none."""
        if ask.answer.done():
            return
        self._asks.remove(ask)
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
        for ask in self._waiting:
            self.refuse(ask, self._over.again())
