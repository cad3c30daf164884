"""Staying with a run that goes on: what it has to say at its start, and its progress until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from flotilla_coordinator.cli.run_output import run_json
from flotilla_coordinator.cli.stack_choice import client_of

if TYPE_CHECKING:
    from flotilla.coordinator.v1.run_pb2 import Run
    from flotilla_client import Client


def stay_with(run_id: str, stack: str | None, coordinator: str | None, *, as_json: bool) -> None:
    """Progress on stderr; the run at its end; exit code 1 when it failed."""
    from flotilla.coordinator.v1.run_pb2 import RUN_STATE_FAILED
    from flotilla_coordinator.cli.exit_codes import RUN_FAILED
    from flotilla_coordinator.cli.output import print_json, say, state_name
    from flotilla_coordinator.cli.progress import progress
    from flotilla_coordinator.cli.running import wait

    async def stay() -> Run:
        async with client_of(stack, coordinator) as client:
            started = await client.get_run(run_id)
            with progress(started) as show:
                async for event in client.watch_run(started.run_id, tell=say):
                    show(event)
            return await client.get_run(started.run_id)

    detached = f"detached: the run goes on. Follow it again: flotilla run watch {run_id}"
    ended = wait(stay(), interrupted=detached)
    if as_json:
        print_json(run_json(ended))
    say(f"run {ended.run_id} {state_name(ended)}" + (f": {ended.reason}" if ended.reason else ""))
    if "eval/accuracy" in ended.metrics:
        before, last, step = (
            ended.metrics[f"eval/{name}"] for name in ("accuracy_before", "accuracy", "step")
        )
        later = f", {last:.3f} after {step:.0f} steps" if step else "; not evaluated since"
        say(f"held-out accuracy: {before:.3f} before{later}")
    say(f"files: {ended.directory}")
    if ended.state == RUN_STATE_FAILED:
        raise typer.Exit(RUN_FAILED)


async def remarks(client: Client, run_id: str) -> list[str]:
    """What the coordinator has to say at the start: notices, up to the first thing that the run does."""
    from contextlib import aclosing

    from flotilla_coordinator.cli.progress import notice_line

    said = []
    async with aclosing(client.watch_run(run_id)) as events:
        async for event in events:
            if event.WhichOneof("event") != "notice":
                break
            said.append(notice_line(event.notice))
    return said
