"""Rooms: jails of their own for the commands and servers of one episode, as the service uses them.

Invariants: a room is a worker with a keeper, so whatever was started in it ends with it. It ends with its episode, and
with this service. A jail demands the level that the stack does, and has no variable of the service: the policy could
read it there. Code that the run trusts has no jail. Whatever a room says is believed no further than its form.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from flotilla_core.errors import InvalidConfig, unicode_text
from flotilla_workers.frames import NoAnswer
from flotilla_workers.functions import Refusal, Target
from flotilla_workers.jail.jail import NO_JAIL, USERS, Cell, Jail, Start
from flotilla_workers.jail.level import Level
from flotilla_workers.pool import FairShare
from flotilla_workers.process import Timeout, WorkerProcess

LOADER = "flotilla_environment.room:load"
TARGET = Target("builtin", "room")
LATE_S = 5.0
"""The time that a room has to say what came of its work, when the limit of that has passed."""
BEGINNINGS_OF_A_PROCESSOR = 4
QUICK_S = 10.0
"""The time for what takes no time of its own, such as a file."""


T = TypeVar("T")


class RoomLost(Exception):
    """The process of a room has ended, or does not answer: nothing in it is left."""


class _Linked(Cell):
    """A jail whose first process has an end of a pair of sockets."""

    def __init__(self, jail: Jail, slot: int, link: socket.socket) -> None:
        super().__init__(jail, (), slot)
        self._link = link

    @contextmanager
    def start(self, command: Sequence[str]) -> Iterator[Start]:
        with super().start(command) as start:
            yield replace(start, descriptors=(*start.descriptors, self._link.fileno()))


class Room:
    """One room that lives."""

    def __init__(
        self, jail: Jail, worker: WorkerProcess, link: socket.socket, ended: Callable[[Room], None]
    ) -> None:
        self.jail = jail
        self._worker = worker
        self._link = link
        self._ended = ended
        self._free = asyncio.Lock()
        self._asking: set[asyncio.Task[Any]] = set()

    @property
    def pid(self) -> int | None:
        """Process id, while it lives."""
        return self._worker.pid if self._worker.alive else None

    async def ask(self, do: str, wait_s: float = QUICK_S, **question: Any) -> Any:
        """Return what came of a question; raise `Refusal` where it cannot be done, and `RoomLost` without an answer."""
        if do == "alone" and self.jail.level is not Level.NAMESPACES:
            raise Refusal("a room without a table of processes of its own cannot end all others")
        return await self._to_its_end(self._ask(do, wait_s, question))

    async def new_socket(self) -> socket.socket:
        """Return a socket of the network of the room, not connected yet."""
        return await self._to_its_end(self._new_socket())

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what comes of work; it goes on where its waiter leaves, because others may use the room."""
        asking = asyncio.ensure_future(work)
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asyncio.shield(asking)

    async def _ask(self, do: str, wait_s: float, question: dict[str, Any]) -> Any:
        async with self._free:
            outcome = await self._worker.ask(TARGET, {"do": do, **question}, wait_s + LATE_S, _said)
        if isinstance(outcome, _Said):
            return outcome.value
        if isinstance(outcome, Timeout):
            raise RoomLost(f"its room said nothing for {outcome.limit_s:g} s")
        if not self._worker.alive:
            raise RoomLost(f"its room ended: {outcome.message}")
        raise Refusal(outcome.message)

    async def _new_socket(self) -> socket.socket:
        async with self._free:
            outcome = await self._worker.ask(TARGET, {"do": "socket"}, QUICK_S, _said)
            if not isinstance(outcome, _Said):
                raise RoomLost("its room gives no socket")
            _, found, _, _ = socket.recv_fds(self._link, 1, 1)
        if len(found) != 1:
            raise RoomLost("its room gives no socket")
        given = socket.socket(fileno=found[0])
        given.setblocking(False)
        return given

    async def close(self) -> None:
        """End all that is in the room."""
        self._ended(self)
        await self._worker.kill()
        self._link.close()


class _Said:
    """A value that a room said; None is one, too."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _said(value: Any) -> _Said:
    match value:
        case None:
            return _Said(None)
        case dict() if all(isinstance(one, str | int | bool | None) for one in value.values()):
            return _Said(
                {str(name): unicode_text(one) if isinstance(one, str) else one for name, one in value.items()}
            )
    raise NoAnswer("it is nothing that a room says")


class Rooms:
    """The rooms of all episodes of a replica."""

    def __init__(self) -> None:
        self._living: set[Room] = set()
        self._opening: set[asyncio.Task[Room]] = set()
        self._stopped = False
        # Their users are those of no worker that is likely to live now.
        self._slots = iter(lambda: secrets.randbelow(USERS), None)
        self.beginnings: FairShare[int] = FairShare()
        """The places for episodes that begin now: what starts in a room takes a processor for a while."""
        for number in range(BEGINNINGS_OF_A_PROCESSOR * len(os.sched_getaffinity(0))):
            self.beginnings.add(number)

    async def open(self, jail: Jail, *, trusted: bool = False, writable: tuple[str, ...] = ()) -> Room:
        """Open a room; without a jail where its code is trusted."""
        if jail.refusal and not trusted:
            raise InvalidConfig("a command of an environment cannot run here", why=jail.refusal)
        own = NO_JAIL if trusted else replace(jail, writable=writable, environment=())
        # Whoever waits for it may leave, and then it is ended.
        opening = asyncio.ensure_future(self._open(own))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_closed)
            raise

    async def _open(self, jail: Jail) -> Room:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with AsyncExitStack() as where_it_fails:
            where_it_fails.callback(ours.close)
            with theirs:
                worker = await WorkerProcess.start(LOADER, _Linked(jail, next(self._slots), theirs))
                room = Room(jail, worker, ours, self._living.discard)
                self._living.add(room)
                where_it_fails.push_async_callback(room.close)
                if (failure := await worker.load(TARGET)) is not None:
                    raise RoomLost(f"its room does not start: {failure.message}")
                await room.ask("link", descriptor=theirs.fileno())
            if self._stopped:
                raise RoomLost("the replica ends")
            where_it_fails.pop_all()
        return room

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the rooms that live."""
        return {f"room {room.pid}": room.pid for room in self._living if room.pid is not None}

    async def stop(self) -> None:
        """End every room, and open none any more."""
        self._stopped = True
        await asyncio.gather(*self._opening, return_exceptions=True)
        await asyncio.gather(*(room.close() for room in [*self._living]))


_closing: set[asyncio.Task[None]] = set()


def _closed(opening: asyncio.Task[Room]) -> None:
    """End a room that nobody waits for."""
    if not opening.cancelled() and opening.exception() is None:
        closing = asyncio.ensure_future(opening.result().close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


def variables_of(jail: Jail, given: Mapping[str, str]) -> dict[str, str]:
    """Return variables of the run, where `${NAME}` is one of the service's that the stack shows to jails."""
    return {name: filled(jail, value) for name, value in given.items()}


def filled(jail: Jail, text: str) -> str:
    """Return a text with the variables of the service in it, each of which the stack must name."""
    first, *others = text.split("${")
    for part in others:
        name, _, rest = part.partition("}")
        if name not in jail.environment or name not in os.environ:
            raise Refusal(
                f"${{{name}}} is none of the variables that environment.isolation.environment of the stack names"
            )
        first += os.environ[name] + rest
    return first
