"""`flotilla run pause` and `set`: changes to a run that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, RunId, Stack
from flotilla_coordinator.cli.run_output import run_json
from flotilla_coordinator.cli.stack_choice import client_of

if TYPE_CHECKING:
    from flotilla.coordinator.v1.run_pb2 import Run

Changes = Annotated[
    list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings of the run, by key.path.")
]


def pause(run: RunId, stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Begin no step after the one that is under way, until `run resume`; the run keeps the fleet."""
    from flotilla_coordinator.cli.output import print_json, say
    from flotilla_coordinator.cli.running import wait

    async def ask() -> Run:
        async with client_of(stack, coordinator) as client:
            return await client.pause_run(run)

    found = wait(ask())
    if as_json:
        print_json(run_json(found))
    else:
        say(f"run {found.run_id} pauses after its current step\nnext: flotilla run resume {found.run_id}")


def set_(
    run: RunId, changes: Changes, stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Change settings of a run from its next step on: steps, learning rate, staleness, evaluation and checkpoints."""
    from flotilla_coordinator.cli.output import print_json, say
    from flotilla_coordinator.cli.running import wait

    async def ask() -> Run:
        async with client_of(stack, coordinator) as client:
            return await client.set_run(run, changes)

    found = wait(ask())
    if as_json:
        print_json(run_json(found))
    else:
        say(f"run {found.run_id} goes on by {', '.join(changes)} after step {found.step}")
