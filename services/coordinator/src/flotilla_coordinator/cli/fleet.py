"""Implements `flotilla up`, `down`, `ps` and `scale`, for the processes of a stack on this host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, Stack

if TYPE_CHECKING:
    from flotilla.coordinator.v1.coordinator_pb2 import Service
    from flotilla.coordinator.v1.run_pb2 import Run
    from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
    from flotilla_client import Client
    from flotilla_launch.paths import StackPaths

Answer = TypeVar("Answer")

_ANSWER_S = 2.0
_RUNS_TO_LOOK_AT = 100


def up(stack: Stack = None, as_json: Json = False) -> None:
    """Start a stack and wait until every service is ready; a running stack is left unchanged."""
    import time

    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, print_table, say
    from flotilla_coordinator.cli.processes import COLUMNS, boot_progress, process_json, process_row
    from flotilla_coordinator.cli.stack import load_stack, make_example, stack_file, stack_paths
    from flotilla_coordinator.plan.placement import placed, seats
    from flotilla_launch import local
    from flotilla_launch.client import find

    make_example(stack_file(stack))
    config = placed(load_stack(stack))
    if not as_json:
        gpus, warnings = seats(config)
        for gpu, who in gpus:
            say(f"GPU {gpu}: {who}")
        for warning in warnings:
            say(f"warning: {warning}")
    # A stack that runs already is left running, and its launcher completes the request by itself.
    runs_already = find(stack_paths(stack)) is not None
    stays = "the stack stays up, and its launcher finishes what it was asked for; see: flotilla ps"
    started = time.monotonic()
    with boot_progress() as show:
        result = wait(
            local.up(config, on_progress=show, on_wait=say, on_tightened=say),
            interrupted=f"interrupted: {stays if runs_already else 'everything that was started is stopped again'}",
        )
        if result.changed:
            show(result.processes)
    if as_json:
        processes = [process_json(process) for process in result.processes]
        print_json({"stack": config.name, "changed": result.changed, "processes": processes})
        return
    if not result.changed:
        say(f"stack {config.name!r} is already running; nothing changed")
        return
    print_table(COLUMNS[:-1], [process_row(process)[:-1] for process in result.processes])
    say(f"stack {config.name!r} is up after {time.monotonic() - started:.0f} s")
    say("next: flotilla run start FILE, flotilla ps, flotilla down")


def down(stack: Stack = None, as_json: Json = False) -> None:
    """Stop all processes of a stack; only its files in the state directory stay."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, say
    from flotilla_coordinator.cli.stack import stack_paths
    from flotilla_launch import local

    paths = stack_paths(stack)
    cut = wait(_going_on(paths))
    stopped = wait(local.down(paths, on_wait=say))
    if as_json:
        print_json({"stack": paths.directory.name, "stopped": stopped})
    elif stopped:
        say(f"stack {paths.directory.name!r} is down")
        for run in cut:
            say(f"run {run.run_id} was interrupted at step {run.step}")
            say(f"to continue it: flotilla up, then flotilla run resume {run.run_id}")
    else:
        say(f"stack {paths.directory.name!r} is not running; nothing to do")


def ps(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the processes of a stack."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, print_table, say
    from flotilla_coordinator.cli.processes import COLUMNS, process_json, process_row
    from flotilla_coordinator.cli.stack import stack_paths

    paths = stack_paths(stack)
    nats_url, processes, services, waiting = wait(_state_of(paths, coordinator))
    if as_json:
        rows = [process_json(process, services.get(process.name)) for process in processes]
        held = [{"run_id": run.run_id, "reason": run.reason} for run in waiting]
        print_json({"stack": paths.directory.name, "nats_url": nats_url, "processes": rows, "waiting": held})
        return
    print_table(COLUMNS, [process_row(process, services.get(process.name)) for process in processes])
    for process in processes:
        if process.error:
            say(f"{process.name}: {process.error}")
    for run in waiting:
        say(f"run {run.run_id} is paused and will continue by itself: {run.reason}")


def scale(
    kind: Annotated[str, typer.Argument(help="generator or reward.")],
    replicas: Annotated[int, typer.Argument(min=0, max=256, help="Wanted number of replicas.")],
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Scale even if an active run is left without a generator or without rewards."
        ),
    ] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Change the number of replicas of a running stack; waits until new ones are ready."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, say
    from flotilla_coordinator.cli.processes import process_json, state_of
    from flotilla_coordinator.cli.stack import load_stack, stack_paths
    from flotilla_core.errors import InvalidRequest
    from flotilla_launch.client import LauncherClient, require
    from flotilla_launch.placement import SCALABLE, kind_name

    kinds = {kind_name(scalable): scalable for scalable in SCALABLE}
    if kind not in kinds:
        raise InvalidRequest(f"{kind!r} cannot be scaled", next_step=f"use one of: {', '.join(kinds)}")
    paths = stack_paths(stack)
    file = require(paths)
    timeout_s = load_stack(stack).ready_timeout_s + 60

    async def ask() -> list[ProcessStatus]:
        if not yes:
            await _refuse_to_starve(paths, kind, replicas)
        async with LauncherClient.open(file) as launcher:
            return await launcher.scale(kinds[kind], replicas, timeout_s=timeout_s)

    say(f"scaling {kind} to {replicas}")
    processes = wait(ask(), interrupted="interrupted; the launcher finishes the change: flotilla ps")
    if as_json:
        print_json({"kind": kind, "processes": [process_json(process) for process in processes]})
    else:
        say(
            f"{kind}: {', '.join(f'{process.name} {state_of(process)}' for process in processes) or 'none left'}"
        )


async def _state_of(
    paths: StackPaths, coordinator: str | None
) -> tuple[str, list[ProcessStatus], dict[str, Service], list[Run]]:
    """Return the address of NATS, the processes, the coordinator's view of them, and the runs that wait."""
    from flotilla.coordinator.v1 import run_pb2
    from flotilla_launch.client import LauncherClient, require

    async with LauncherClient.open(require(paths)) as launcher:
        state = await launcher.state()
    services = await _services(paths, coordinator)
    runs = await _ask(paths, coordinator, lambda client: client.list_runs(_RUNS_TO_LOOK_AT)) or []
    # A pause that a user requested has no reason.
    waiting = [run for run in runs if run.state == run_pb2.RUN_STATE_PAUSED and run.reason]
    return state.nats_url, list(state.processes), services, waiting


async def _refuse_to_starve(paths: StackPaths, kind: str, replicas: int) -> None:
    """Refuse to remove an active run's last generator or reward without --yes: the run would wait, and then fail."""
    from flotilla_core.errors import InvalidRequest

    busy = [run.run_id for run in await _going_on(paths)]
    # A generator serves one run, and a reward serves all runs together.
    wanted = len(busy) if kind == "generator" else min(len(busy), 1)
    if wanted > replicas:
        each = "each needs a generator" if kind == "generator" else "and need a reward service"
        raise InvalidRequest(
            f"run {busy[0]} needs a {kind}"
            if len(busy) == 1
            else f"{len(busy)} runs are active, {each}: {', '.join(busy)}",
            why="a run that has none waits for one, and fails after ready_timeout_s",
            next_step=f"stop it first (`flotilla run stop {busy[0]}`), or pass --yes",
        )


async def _going_on(paths: StackPaths) -> list[Run]:
    """Return runs that have not ended; a paused run keeps its services, because it may continue at any time."""
    from flotilla.coordinator.v1 import run_pb2

    working = (run_pb2.RUN_STATE_PENDING, run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_PAUSED)
    runs = await _ask(paths, None, lambda client: client.list_runs(_RUNS_TO_LOOK_AT)) or []
    return [run for run in runs if run.state in working]


async def _services(paths: StackPaths, coordinator: str | None) -> dict[str, Service]:
    """Return the coordinator's view of the services by name; empty while it cannot be reached."""
    found = await _ask(paths, coordinator, lambda client: client.list_services()) or []
    return {service.registration.name: service for service in found}


async def _ask(
    paths: StackPaths, coordinator: str | None, ask: Callable[[Client], Awaitable[Answer]]
) -> Answer | None:
    """Return the coordinator's answer; None while it cannot be reached."""
    from flotilla_client import Client
    from flotilla_core.errors import FlotillaError

    try:
        async with Client.find(paths.directory.name, paths.directory.parent, coordinator) as client:
            return await asyncio.wait_for(ask(client), _ANSWER_S)
    except (FlotillaError, TimeoutError):
        return None
