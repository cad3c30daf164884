"""The one registry watch, which feeds every run's view of the fleet.

Invariant: a coordinator that no longer sees its fleet does not look healthy: it ends, and is started again.
"""

from __future__ import annotations

import asyncio

from flotilla_coordinator.fleet import Fleet
from flotilla_core.service import Host
from flotilla_core.tasks import both

LOOK_EVERY_S = 0.1


async def keep_in_view(fleet: Fleet, host: Host) -> None:
    """Show the fleet who exists, for as long as the coordinator works."""
    try:
        await both(_follow(fleet, host), _look_again(fleet))
    # Whatever ended it, the fleet is out of view now.
    except Exception as error:  # noqa: BLE001
        host.failed(error)


async def _follow(fleet: Fleet, host: Host) -> None:
    async for snapshot in host.registry.watch():
        await fleet.see(snapshot)


async def _look_again(fleet: Fleet) -> None:
    """Nobody tells when the last group on a generator has ended, or a process is away for too long."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if fleet.changes_with_time:
            await fleet.settle()
