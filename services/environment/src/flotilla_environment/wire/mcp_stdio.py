"""MCP by the standard input and output of a process, in a room of its own.

Invariant: an episode has a process of its own, so what a server remembers is of that episode. One that ended is started
anew in the same room.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from flotilla_environment.rooms import Room, RoomLost, variables_of
from flotilla_environment.servers import Place
from flotilla_environment.wire.http import Lost
from flotilla_environment.wire.mcp import Json, Take, parsed


class Stdio:
    """A server that a command starts."""

    def __init__(self, place: Place, command: Sequence[str], environment: dict[str, str]) -> None:
        self._place = place
        self._command = [*command]
        self._environment = variables_of(place.jail, environment)
        self._room: Room | None = None

    async def open(self) -> None:
        if self._room is not None and self._room.pid is None:
            await self.close()
        if self._room is None:
            self._room = await self._place.room()
        await self._ask("talk", command=self._command, environment=self._environment)

    async def exchange(self, message: Json, take: Take, limit_s: float) -> None:
        line, until = json.dumps(message), time.monotonic() + limit_s
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            # The room has the limit: it says that nothing came, and the server goes on.
            said = await self._ask("exchange", left, line=line, limit_s=left, wants=True)
            for one in parsed(str(said["line"])):
                if await take(one):
                    return
            line = ""

    async def tell(self, message: Json) -> None:
        await self._ask("exchange", line=json.dumps(message), limit_s=1.0, wants=False)

    def agreed(self, version: str) -> None:
        """Nothing is said about it by this way."""

    async def close(self) -> None:
        if self._room is not None:
            room, self._room = self._room, None
            await room.close()

    async def _ask(self, do: str, wait_s: float = 10.0, **question: object) -> Json:
        assert self._room is not None
        try:
            said = await self._room.ask(do, wait_s, **question) or {}
        except RoomLost as error:
            raise Lost(str(error)) from error
        if "ended" in said:
            raise Lost(f"the server {self._command[0]} {said['ended']}")
        if "late" in said:
            raise TimeoutError
        return dict(said)
