"""Servers that the service starts for the environments of runs, each for many episodes.

Invariants: a server is in a room of its own. It lives while an episode uses it, and for a while after the last one. One
that has ended is started anew for the next episode that asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from flotilla_environment.rooms import Room, RoomLost, Rooms, variables_of
from flotilla_workers.functions import Refusal
from flotilla_workers.jail.jail import Jail
from flotilla_workers.jail.level import Level

IDLE_S = 60.0
START_LIMIT_S = 60.0


@dataclass(eq=False)
class Server:
    """A server that listens in its room."""

    room: Room
    port: int
    uses: int = 0
    idle: asyncio.TimerHandle | None = None

    async def lives(self) -> bool:
        """Return whether the server has not ended."""
        try:
            return bool((await self.room.ask("serving", port=self.port))["serves"])
        except RoomLost:
            return False


class Servers:
    """The servers of all runs."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._of: dict[Hashable, Server] = {}
        self._starting: dict[Hashable, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def of(
        self, run_id: str, command: Sequence[str], environment: dict[str, str], jail: Jail, *, trusted: bool
    ) -> AsyncIterator[Server]:
        """Give the server of a run that a command starts; it stays at least as long as the block."""
        key = (run_id, *command, *sorted(environment.items()), trusted)
        async with self._starting.setdefault(key, asyncio.Lock()):
            server = self._of.get(key)
            if server is None or not await server.lives():
                server = await self._started([*command], environment, jail, trusted=trusted)
                self._of[key] = server
            server.uses += 1
            if server.idle is not None:
                server.idle.cancel()
        try:
            yield server
        finally:
            server.uses -= 1
            if not server.uses:
                server.idle = asyncio.get_running_loop().call_later(IDLE_S, self._retire, key, server)

    async def _started(
        self, command: list[str], environment: dict[str, str], jail: Jail, *, trusted: bool
    ) -> Server:
        if jail.level is Level.LANDLOCK and not trusted:
            raise Refusal(
                "the jail of this host has no network of its own, so no server can listen in it: give the url of "
                "one that runs already, or say environment.trusted: true in the run"
            )
        async with AsyncExitStack() as where_it_fails:
            room = await self._rooms.open(jail, trusted=trusted)
            where_it_fails.push_async_callback(room.close)
            filled = variables_of(jail, environment)
            found = await room.ask(
                "serve", START_LIMIT_S, command=command, environment=filled, limit_s=START_LIMIT_S
            )
            if "port" not in found:
                raise RoomLost(f"the server {command[0]} {found.get('ended', 'did not start')}")
            where_it_fails.pop_all()
        return Server(room, int(found["port"]))

    def _retire(self, key: Hashable, server: Server) -> None:
        if self._of.get(key) is server:
            del self._of[key]
        closing = asyncio.ensure_future(server.room.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


@dataclass(frozen=True)
class Place:
    """The means of a run whose episodes the service plays itself."""

    run_id: str
    trusted: bool
    """True where the run vouches for its commands: they run as the service does."""
    jail: Jail
    rooms: Rooms
    servers: Servers

    async def room(self, writable: Sequence[str] = ()) -> Room:
        """Open a room for one episode."""
        return await self.rooms.open(self.jail, trusted=self.trusted, writable=tuple(writable))
