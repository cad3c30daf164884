"""Implements `flotilla run track`, which sends the trackers of an ended run what they have not taken.

Invariants: an active run is left to its coordinator, because two processes of one tracker would tell lines twice. What
was taken is not sent again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, Stack
from flotilla_coordinator.cli.run import Latest, ask_or_else, get_run
from flotilla_coordinator.cli.stack import client_of

if TYPE_CHECKING:
    from flotilla.coordinator.v1.run_pb2 import Run


def track(
    run: Latest = "latest", stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Send the trackers of an ended run what they have not taken; also while the stack is down."""
    from flotilla_coordinator.cli.output import print_json, print_table, say, state_name
    from flotilla_coordinator.trackers.follow import TrackerProcess, tracker_errors
    from flotilla_core.config import RunConfig, load_text
    from flotilla_core.errors import FailedPrecondition, InvalidConfig

    async def ask() -> tuple[Run, str]:
        async with client_of(stack, coordinator) as client:
            answer = await client.get_run_and_config(run)
            return answer.run, answer.config_yaml

    found, config_yaml = ask_or_else(ask(), lambda paths: get_run(paths, run), stack, coordinator)
    if not found.HasField("ended_at"):
        raise FailedPrecondition(
            f"run {found.run_id} has not ended",
            why="its coordinator gives its trackers what is there",
            next_step=f"wait for its end: flotilla run watch {found.run_id}",
        )
    config = load_text(RunConfig, config_yaml, source=f"run {found.run_id}")
    if errors := tracker_errors(config):
        raise InvalidConfig("the trackers cannot be used", where=f"run {found.run_id}", why="; ".join(errors))
    processes = [
        TrackerProcess(found.run_id, Path(found.directory), config, section, section.type)
        for section in config.trackers
    ]

    async def send() -> None:
        for process in processes:
            process.end(state_name(found))
        await asyncio.gather(*(process.run(lambda _, text: say(text)) for process in processes))

    asyncio.run(send())
    left = {process.name: process.behind() for process in processes}
    if as_json:
        print_json({"behind": left})
    else:
        rows = [(one.name, str(one.progress.points), str(left[one.name]), one.reason) for one in processes]
        print_table(("TRACKER", "TAKEN", "BEHIND", "WHY"), rows)
    if any(left.values()):
        raise typer.Exit(1)
