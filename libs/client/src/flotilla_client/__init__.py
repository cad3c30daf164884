"""Public Python client of a Flotilla fleet.

    from flotilla_client import connect

    with connect() as fleet:
        run = fleet.start_run("run.yaml", ["steps=20"])
        for event in fleet.watch_run(run.run_id):
            ...

A training loop of one's own is `fleet.open_loop("run.yaml")`; docs/custom-loops.md shows one. `Client` is the same for
asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla_client.client import Client, resolve_run
    from flotilla_client.discovery import find_coordinator
    from flotilla_client.groups import Group, Prompt, Sample
    from flotilla_client.loop import EvaluationResult, HeldOutResult, Loop, StepResult
    from flotilla_client.synchronous import SyncClient, connect
    from flotilla_client.synchronous_loop import SyncLoop

__all__ = [
    "Client",
    "EvaluationResult",
    "Group",
    "HeldOutResult",
    "Loop",
    "Prompt",
    "Sample",
    "StepResult",
    "SyncClient",
    "SyncLoop",
    "connect",
    "find_coordinator",
    "resolve_run",
]

_MODULES = {
    "Client": "client",
    "EvaluationResult": "loop",
    "Group": "groups",
    "HeldOutResult": "loop",
    "Loop": "loop",
    "Prompt": "groups",
    "Sample": "groups",
    "StepResult": "loop",
    "SyncClient": "synchronous",
    "SyncLoop": "synchronous_loop",
    "connect": "synchronous",
    "find_coordinator": "discovery",
    "resolve_run": "client",
}
"""The module of each name, loaded when it is asked for: not everybody should wait for numpy and gRPC."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"flotilla_client.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
