"""Rooms are real jails; what one of their users does ends them for nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flotilla_environment.holders import Holders
from flotilla_environment.rooms import Room
from flotilla_workers.functions import Refusal
from flotilla_workers.jail.jail import Jail

NAP = ["sleep", "0.1"]


async def printed(room: Room, *command: str) -> object:
    said = await room.ask("run", command=[*command], folder="/", environment={}, limit_s=5.0)
    return said["text"]


ASKS: dict[str, Callable[[Room], Awaitable[object]]] = {
    "run": lambda room: printed(room, *NAP),
    "socket": lambda room: room.new_socket(),
}


@pytest.mark.parametrize("ask", ASKS)
async def test_who_leaves_a_room_ends_it_for_nobody_else(
    holders: Holders, namespaces: Jail, ask: str
) -> None:
    room = await holders.place("run", trusted=False).room()
    leaves = asyncio.ensure_future(ASKS[ask](room))  # type: ignore[arg-type]
    stays = asyncio.ensure_future(printed(room, "echo", "well"))
    async with asyncio.timeout(5):
        while not room._free.locked():
            await asyncio.sleep(0)
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert await stays == "well" and room.pid is not None
    with await room.new_socket():
        assert not room._asking
    await room.close()


async def test_only_a_room_with_processes_of_its_own_ends_all_others(holders: Holders) -> None:
    room = await holders.place("run", trusted=True).room()
    await room.close()  # One that lived would end every process of this user, were it asked.
    with pytest.raises(Refusal, match="cannot end all others"):
        await room.ask("alone")
