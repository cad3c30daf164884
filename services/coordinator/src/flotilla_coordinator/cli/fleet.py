"""`flotilla up`, `down`, `ps` and `scale`: the processes of a stack on this host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, Stack

if TYPE_CHECKING:
    from flotilla.coordinator.v1.coordinator_pb2 import Service
    from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
    from flotilla_launch.paths import StackPaths


def up(stack: Stack = None, as_json: Json = False) -> None:
    """Start a stack and wait until every service is ready; a running one stays as it is."""
    import time

    from flotilla_coordinator.cli.example import make_example
    from flotilla_coordinator.cli.output import print_json, say
    from flotilla_coordinator.cli.running import wait
    from flotilla_coordinator.cli.stack_choice import load_stack, stack_file
    from flotilla_launch import local

    make_example(stack_file(stack))
    config = load_stack(stack)
    shown: dict[str, str] = {}

    def show(processes: list[ProcessStatus]) -> None:
        for process in processes:
            state = _state(process)
            if shown.get(process.name) != state:
                shown[process.name] = state
                say(f"  {process.name:14} {state}")

    started = time.monotonic()
    result = wait(
        local.up(config, on_progress=show, on_wait=say),
        interrupted="interrupted: everything that was started is stopped again",
    )
    if as_json:
        processes = [process_json(process) for process in result.processes]
        print_json({"stack": config.name, "changed": result.changed, "processes": processes})
        return
    if result.changed:
        show(result.processes)
        say(
            f"stack {config.name!r} is up: {len(result.processes)} processes, {time.monotonic() - started:.1f} s"
        )
        say("next: flotilla run start FILE, flotilla ps, flotilla down")
    else:
        say(f"stack {config.name!r} is already running; nothing changed")


def down(stack: Stack = None, as_json: Json = False) -> None:
    """Stop a stack, all of it; nothing is left behind but its files in the state directory."""
    from flotilla_coordinator.cli.output import print_json, say
    from flotilla_coordinator.cli.running import wait
    from flotilla_coordinator.cli.stack_choice import stack_paths
    from flotilla_launch import local

    paths = stack_paths(stack)
    stopped = wait(local.down(paths, on_wait=say))
    if as_json:
        print_json({"stack": paths.directory.name, "stopped": stopped})
    elif stopped:
        say(f"stack {paths.directory.name!r} is down")
    else:
        say(f"stack {paths.directory.name!r} is not running; nothing to do")


def ps(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the processes of a stack."""
    from flotilla_coordinator.cli.output import age, print_json, print_table, say
    from flotilla_coordinator.cli.running import wait
    from flotilla_coordinator.cli.stack_choice import stack_paths

    paths = stack_paths(stack)
    nats_url, processes, services = wait(_state_of(paths, coordinator))
    if as_json:
        rows = [process_json(process, services.get(process.name)) for process in processes]
        print_json({"stack": paths.directory.name, "nats_url": nats_url, "processes": rows})
        return
    columns = ("NAME", "KIND", "STATE", "PID", "ADDRESS", "RESTARTS", "SINCE", "VERSION")
    print_table(
        columns, [_row(process, services.get(process.name), age(process.since)) for process in processes]
    )
    for process in processes:
        if process.error:
            say(f"{process.name}: {process.error}")


def scale(
    kind: Annotated[str, typer.Argument(help="generator or reward")],
    replicas: Annotated[int, typer.Argument(min=0, help="How many there shall be.")],
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Change the number of replicas while the stack runs; waits until new ones are ready."""
    from flotilla_coordinator.cli.output import print_json, say
    from flotilla_coordinator.cli.running import wait
    from flotilla_coordinator.cli.stack_choice import load_stack, stack_paths
    from flotilla_core.errors import InvalidRequest
    from flotilla_launch.client import LauncherClient, require
    from flotilla_launch.placement import SCALABLE, kind_name

    kinds = {kind_name(scalable): scalable for scalable in SCALABLE}
    if kind not in kinds:
        raise InvalidRequest(
            f"there is nothing to scale called {kind!r}", next_step=f"use one of: {', '.join(kinds)}"
        )
    file = require(stack_paths(stack))
    timeout_s = load_stack(stack).ready_timeout_s + 60

    async def ask() -> list[ProcessStatus]:
        async with LauncherClient.open(file) as launcher:
            return await launcher.scale(kinds[kind], replicas, timeout_s=timeout_s)

    say(f"scaling {kind} to {replicas}")
    processes = wait(ask(), interrupted="the launcher goes on; see: flotilla ps")
    if as_json:
        print_json({"kind": kind, "processes": [process_json(process) for process in processes]})
    else:
        say(
            f"{kind}: {', '.join(f'{process.name} {_state(process)}' for process in processes) or 'none left'}"
        )


def process_json(process: ProcessStatus, service: Service | None = None) -> dict[str, Any]:
    """One process in the output of `up`, `ps` and `scale`."""
    return {
        "name": process.name,
        "kind": _kind(process),
        "state": _state(process),
        "pid": process.pid or None,
        "address": process.address or None,
        "instance_id": process.instance_id or None,
        "restarts": process.restarts,
        "since": process.since.ToJsonString(),
        "log": process.log_path or None,
        "error": process.error or None,
        "policy_version": _version(service),
        "run_id": service.run_id or None if service is not None else None,
    }


async def _state_of(
    paths: StackPaths, coordinator: str | None
) -> tuple[str, list[ProcessStatus], dict[str, Service]]:
    from flotilla_launch.client import LauncherClient, require

    async with LauncherClient.open(require(paths)) as launcher:
        state = await launcher.state()
    services = await _services(paths, coordinator)
    return state.nats_url, list(state.processes), services


async def _services(paths: StackPaths, coordinator: str | None) -> dict[str, Service]:
    """What the coordinator knows by name; nothing while it cannot be reached."""
    from flotilla_client import Client
    from flotilla_core.errors import FlotillaError

    try:
        async with Client.find(paths.directory.name, paths.directory.parent, coordinator) as client:
            found = await asyncio.wait_for(client.list_services(), 2.0)
    except (FlotillaError, TimeoutError):
        return {}
    return {service.registration.name: service for service in found}


def _row(process: ProcessStatus, service: Service | None, since: str) -> tuple[str, ...]:
    return (
        process.name,
        _kind(process),
        _state(process),
        str(process.pid or ""),
        process.address,
        str(process.restarts),
        since,
        _version(service) or "",
    )


def _kind(process: ProcessStatus) -> str:
    from flotilla_launch.placement import kind_name

    # Of all processes, NATS alone is no service of ours.
    return kind_name(process.kind) if process.kind else process.name


def _state(process: ProcessStatus) -> str:
    from flotilla.launcher.v1.launcher_pb2 import ProcessState

    return ProcessState.Name(process.state).removeprefix("PROCESS_STATE_").lower()


def _version(service: Service | None) -> str | None:
    if service is None or not service.HasField("live_version"):
        return None
    return f"{service.live_version.lineage}.{service.live_version.step}"
