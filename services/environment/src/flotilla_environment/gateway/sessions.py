"""The sessions that are open, and the tasks that wait for agents that serve many.

Invariants: a session is found by its id while it is open, and for a while afterwards it is known to be over. A task is
given to one agent alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_environment.gateway.session import Session

MOST_REMEMBERED = 10_000
"""Sessions that are over and still known."""


@dataclass(eq=False)
class Offer:
    """A task that waits for an agent."""

    run_id: str
    session: Session
    taken: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Queue:
    """The tasks that wait for agents that serve many."""

    def __init__(self, comes: Callable[[bytes], None] = lambda _: None) -> None:
        """`comes` is told the hash of the key of each agent that asks for a task."""
        self.comes = comes
        self._waiting: deque[Offer] = deque()
        self._changed = asyncio.Event()

    async def offer(self, run_id: str, session: Session) -> None:
        """Wait until an agent has taken the task of a session."""
        one = Offer(run_id, session)
        self._waiting.append(one)
        self._changed.set()
        try:
            await one.taken
        finally:
            if one in self._waiting:
                self._waiting.remove(one)

    async def take(self, run_id: str) -> Offer:
        """Return the task that waits for the longest time, of one run where it is named; for `given`."""
        while True:
            for one in self._waiting:
                if run_id in ("", one.run_id) and not one.taken.done():
                    self._waiting.remove(one)
                    return one
            self._changed.clear()
            await self._changed.wait()

    @contextmanager
    def given(self, one: Offer, agent: bytes) -> Iterator[Session]:
        """Give a task to an agent, as the hash of its key; where the block raises, it is the next one for others."""
        one.session.taken_by = agent
        try:
            yield one.session
            if not one.taken.done():
                one.taken.set_result(None)
        finally:
            if not one.taken.done():
                one.session.taken_by = b""
                self._waiting.appendleft(one)
                self._changed.set()


class Sessions:
    """All sessions of a replica."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._over: dict[str, None] = {}
        self._queues: dict[bytes, Queue] = {}

    def open(self, task: Mapping[str, Any]) -> Session:
        """Open a session."""
        session = Session(task)
        self._open[session.id] = session
        return session

    def close(self, session: Session, why: str) -> None:
        """End a session, whose requests are told why."""
        session.close(why)
        if self._open.pop(session.id, None) is not None:
            self._over[session.id] = None
            if len(self._over) > MOST_REMEMBERED:
                del self._over[next(iter(self._over))]

    def find(self, session_id: str) -> Session:
        """Return an open session by its id."""
        if session_id in self._over:
            raise FailedPrecondition("the session is over", why="its episode has ended")
        if session_id not in self._open:
            raise NotFound("there is no such session")
        return self._open[session_id]

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, key: bytes, queue: Queue) -> None:
        """Let whoever shows a key take tasks of a queue."""
        self._queues[hash_of(key)] = queue

    def forget(self, key: bytes) -> None:
        """Know a key no longer."""
        self._queues.pop(hash_of(key), None)

    def queue_of(self, key: bytes) -> Queue | None:
        """Return the queue of a key; the time that this takes tells nothing of other keys."""
        return self._queues.get(hash_of(key))


def hash_of(key: bytes) -> bytes:
    """Return what stands for a key, and does not tell it."""
    return hashlib.sha256(key).digest()
