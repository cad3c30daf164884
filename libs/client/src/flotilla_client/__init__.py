"""Public Python client of a Flotilla fleet.

    from flotilla_client import connect

    with connect() as fleet:
        run = fleet.start_run("run.yaml", ["steps=20"])
        for event in fleet.watch_run(run.run_id):
            ...

`Client` is the same for asyncio.
"""

from __future__ import annotations

from flotilla_client.client import Client, resolve_run
from flotilla_client.discovery import find_coordinator
from flotilla_client.synchronous import SyncClient, connect

__all__ = ["Client", "SyncClient", "connect", "find_coordinator", "resolve_run"]
