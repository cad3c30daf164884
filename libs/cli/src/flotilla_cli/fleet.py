"""Implements `flotilla up`, `down`, `ps`, `scale` and `upgrade`, for the processes of a stack on any launcher."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import typer

from flotilla.common.v1.operate_pb2 import DescribeRequest
from flotilla.common.v1.registration_pb2 import SERVICE_KIND_REWARD
from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.coordinator_pb2 import Service
from flotilla.coordinator.v1.run_pb2 import Run
from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
from flotilla_cli.config import check
from flotilla_cli.options import Coordinator, Json, Stack, wait
from flotilla_cli.output import print_json, print_line, print_table, say
from flotilla_cli.processes import (
    as_the_coordinator_sees,
    boot_progress,
    isolation_of,
    process_json,
    process_table,
    say_isolation,
    state_of,
)
from flotilla_cli.services import ServiceAddress, answer_soon, services_seen
from flotilla_cli.stack import (
    client_of,
    load_stack,
    load_stack_with_model,
    make_example,
    stack_file,
    stack_paths,
    with_models_here,
)
from flotilla_client.discovery import credential_of_caller
from flotilla_core import rpc
from flotilla_core.config import StackConfig
from flotilla_core.config.model import is_url
from flotilla_core.errors import FlotillaError, InvalidRequest
from flotilla_core.gangs import model_of, model_roles, started, with_model
from flotilla_core.kinds import KINDS, Kind
from flotilla_core.model_folder import model_folder
from flotilla_launch.kubernetes.engine import KubernetesEngine
from flotilla_launch.launcher import (
    KUBERNETES,
    LAUNCHERS,
    LOCAL,
    ON_THIS_HOST,
    AttachedLauncher,
    Launcher,
    launcher_for,
    launcher_of,
    planned,
)
from flotilla_launch.local import executables_directory
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import PlacedFile, is_up
from flotilla_launch.upgrade import Upgrade, kind_of, upgradable

PLAN_COLUMNS = ("NODE", "SERVICE", "KIND", "CPUS", "GPUS", "MEMORY", "PORTS")

_RUNS_TO_LOOK_AT = 100
_DESCRIBE_S = 2.0


def up(
    stack: Stack = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="LAUNCHER",
            show_default="that of the running stack, or local",
            help="local (this host), compose (containers of this host), slurm, ray, or kubernetes (experimental: no "
            "cluster has run it).",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print which service runs where, and start nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a stack and wait until every service is ready; a running stack is left unchanged."""
    _require_launcher(on)
    paths = stack_paths(stack)
    make_example(stack_file(stack))
    config = load_stack_with_model(stack)
    launcher = _launcher(config, paths) if config.launcher.attach else launcher_for(on, paths)
    # A stack that runs already is left running, and its launcher completes the request by itself.
    runs_already = is_up(paths)
    if not runs_already:
        _check(config, launcher.name)
    config = _placeable(config, launcher.name, quiet=as_json)
    if plan:
        _show_plan(config, launcher.name, as_json=as_json)
        return
    stays = "the stack stays up, and its launcher finishes what it was asked for; see: flotilla ps"
    started = time.monotonic()
    with boot_progress() as show:
        result = wait(
            launcher.place(config, on_progress=show, on_wait=say),
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
    print_table(*process_table(result.processes, {}))
    say_isolation(wait(_isolation(config, paths, result.processes)))
    where = "" if launcher.name == LOCAL else f" on {launcher.name}"
    say(f"stack {config.name!r} is up{where} after {time.monotonic() - started:.0f} s")
    placed = PlacedFile.read(paths.placed_file)
    reach = placed.reach if placed is not None else ""
    start = f"{reach} run start /dev/stdin < FILE" if reach else "flotilla run start FILE"
    say(f"next: {start}, flotilla ps, flotilla down")


def down(stack: Stack = None, as_json: Json = False) -> None:
    """Stop all processes of a stack; only its files in the state directory stay."""
    paths = stack_paths(stack)
    cut = wait(_going_on(paths))
    stopped = wait(_launcher(load_stack(stack), paths).down(on_wait=say))
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
    paths = stack_paths(stack)
    launcher = _launcher(load_stack(stack), paths)
    nats_url, processes, services, waiting = wait(_state_of(launcher, paths, coordinator))
    if as_json:
        rows = [process_json(process, services.get(process.name)) for process in processes]
        held = [{"run_id": run.run_id, "reason": run.reason} for run in waiting]
        print_json({"stack": paths.directory.name, "nats_url": nats_url, "processes": rows, "waiting": held})
        return
    print_table(*process_table(processes, services))
    say_isolation(isolation_of(services))
    for process in processes:
        if process.error:
            say(f"{process.name}: {process.error}")
    for run in waiting:
        say(f"run {run.run_id} is paused and will continue by itself: {run.reason}")


def scale(
    kind: Annotated[str, typer.Argument(help="A kind with replicas, such as generator or reward.")],
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
    kinds = {one.name: one for one in KINDS if one.scales}
    if kind not in kinds:
        raise InvalidRequest(f"{kind!r} cannot be scaled", next_step=f"use one of: {', '.join(kinds)}")
    paths, config = stack_paths(stack), load_stack(stack)
    launcher = _launcher(config, paths)
    timeout_s = config.ready_timeout_s + 60

    async def ask() -> list[ProcessStatus]:
        if not yes:
            await _refuse_to_starve(paths, kinds[kind], replicas)
        return await launcher.scale(kinds[kind].number, replicas, timeout_s=timeout_s)

    say(f"scaling {kind} to {replicas}")
    processes = wait(ask(), interrupted="interrupted; the launcher finishes the change: flotilla ps")
    if as_json:
        print_json({"kind": kind, "processes": [process_json(process) for process in processes]})
    else:
        say(
            f"{kind}: {', '.join(f'{process.name} {state_of(process)}' for process in processes) or 'none left'}"
        )


def upgrade(
    kind: Annotated[
        str, typer.Argument(help="A kind with replicas, such as generator or reward.")
    ] = "generator",
    grace: Annotated[
        float,
        typer.Option("--grace", min=0, max=86400, help="Seconds that a replica may finish what it has."),
    ] = 600.0,
    spare: Annotated[
        bool,
        typer.Option(
            "--spare/--no-spare",
            help="Start one more replica for each run first, so that no run has fewer meanwhile.",
        ),
    ] = True,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Replace the replicas of a running stack one by one with processes of the release of this command."""
    wanted = kind_of(kind)
    launcher = upgradable(launcher_of(stack_paths(stack)), kind)
    ready_timeout_s = load_stack(stack).ready_timeout_s

    async def act() -> list[ProcessStatus]:
        async with client_of(stack, coordinator) as client:
            one_by_one = Upgrade(
                launcher, client, wanted, executables_directory(), ready_timeout_s, grace, on_wait
            )
            return await one_by_one.run(spare=spare)

    on_wait = (lambda _: None) if as_json else say
    processes = wait(
        act(), interrupted="interrupted; replicas that were not replaced work as before: flotilla ps"
    )
    if as_json:
        print_json({"kind": kind, "processes": [process_json(process) for process in processes]})
    else:
        say(f"replaced: {', '.join(process.name for process in processes)}")


def _launcher(stack: StackConfig, paths: StackPaths) -> Launcher:
    """Return the launcher that has the stack: of another machine where its file says so."""
    if stack.launcher.attach is None:
        return launcher_of(paths)
    return AttachedLauncher(stack.launcher.attach, credential_of_caller(stack.bind, paths.directory))


def _require_launcher(name: str | None) -> None:
    """Refuse a launcher that there is not, with the name that was probably meant."""
    if name is not None and name not in LAUNCHERS:
        near = difflib.get_close_matches(name, LAUNCHERS, n=1)
        raise InvalidRequest(
            f"there is no launcher {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
            where="--on",
            next_step=f"use one of: {', '.join(LAUNCHERS)}",
        )


def _check(stack: StackConfig, launcher: str) -> None:
    """Raise what would end the services of this host at their start, before there are any."""
    if launcher in ON_THIS_HOST:
        check(stack)
    if launcher == LOCAL:
        of_gangs = (model_of(stack, role) for role in model_roles(stack) if started(stack, role))
        for model in dict.fromkeys([stack.model, *of_gangs]):
            if not is_url(model):
                model_folder(model)  # One of the hub is downloaded once for all services.


def _placeable(stack: StackConfig, launcher: str, *, quiet: bool) -> StackConfig:
    """Return the stack with what its file leaves to the host; a launcher of other hosts cannot ask them."""
    if launcher not in ON_THIS_HOST:
        return stack
    from flotilla_coordinator.plan.placement import placed, seats

    here = with_models_here(stack)
    decided = placed(here)
    placeable = decided
    for role in model_roles(stack):
        if model_of(here, role) != model_of(stack, role):
            placeable = with_model(placeable, role, model_of(stack, role))
    if not quiet:
        gpus, warnings = seats(decided)
        for gpu, who in gpus:
            say(f"GPU {gpu}: {who}")
        for warning in warnings:
            say(f"warning: {warning}")
    return placeable


def _show_plan(stack: StackConfig, launcher: str, *, as_json: bool) -> None:
    """Print the table of the stack as this launcher would place it."""
    rows = [row.as_dict() for row in planned(stack, launcher)]
    if as_json:
        print_json({"stack": stack.name, "launcher": launcher, "services": rows})
        return
    print_table(PLAN_COLUMNS, [_plan_cells(row) for row in rows])
    for row in rows:
        print_line(f"\n{row['name']}: {' '.join(row['command'])}")
        for name, value in row["environment"].items():
            print_line(f"  {name}={value}")


def _plan_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["node"],
        row["name"],
        row["kind"],
        str(row["cpus"] or ""),
        ", ".join(row["gpus"]),
        f"{row['memory_mib']} MiB" if row["memory_mib"] else "",
        ", ".join(str(port or "any") for port in row["ports"]),
    )


async def _isolation(
    config: StackConfig, paths: StackPaths, processes: Iterable[ProcessStatus]
) -> dict[str, str]:
    """Return the isolation of the reward services: the coordinator may not have heard of it so soon."""
    found = {}
    for process in processes:
        if process.kind == SERVICE_KIND_REWARD and process.address:
            with suppress(FlotillaError):  # One in a network of its own cannot be asked from here.
                credential = credential_of_caller(config.bind, paths.directory)
                service = ServiceAddress(process.name, process.kind, process.address, credential)
                async with service.operated() as stub:
                    described = await rpc.unary(stub.Describe, DescribeRequest(), timeout_s=_DESCRIBE_S)
                found[process.name] = described.registration.isolation
    return found


async def _state_of(
    launcher: Launcher, paths: StackPaths, coordinator: str | None
) -> tuple[str, list[ProcessStatus], dict[str, Service], list[Run]]:
    """Return the address of NATS, the processes, the coordinator's view of them, and the runs that wait."""
    state = await launcher.state()
    services = await services_seen(paths, coordinator)
    processes = as_the_coordinator_sees(list(state.processes), services)
    runs = await answer_soon(paths, coordinator, lambda client: client.list_runs(_RUNS_TO_LOOK_AT)) or []
    # A pause that a user requested has no reason.
    waiting = [run for run in runs if run.state == run_pb2.RUN_STATE_PAUSED and run.reason]
    return state.nats_url, processes, services, waiting


async def _refuse_to_starve(paths: StackPaths, kind: Kind, replicas: int) -> None:
    """Refuse to remove an active run's last replica of a kind without --yes: the run would wait, and then fail."""
    busy = [run.run_id for run in await _going_on(paths)]
    wanted = 0 if kind.optional else min(len(busy), 1) if kind.shared else len(busy)
    if wanted > replicas:
        each = f"and need a {kind.name} service" if kind.shared else f"each needs a {kind.name}"
        raise InvalidRequest(
            f"run {busy[0]} needs a {kind.name}"
            if len(busy) == 1
            else f"{len(busy)} runs are active, {each}: {', '.join(busy)}",
            why="a run that has none waits for one, and fails after ready_timeout_s",
            next_step=f"stop it first (`flotilla run stop {busy[0]}`), or pass --yes",
        )


async def _going_on(paths: StackPaths) -> list[Run]:
    """Return runs that have not ended; a paused run keeps its services, because it may continue at any time."""
    working = (run_pb2.RUN_STATE_PENDING, run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_PAUSED)
    if launcher_of(paths).name == KUBERNETES:
        try:
            runs = await KubernetesEngine(paths).runs()
        except FlotillaError:
            runs = []  # The coordinator may be what is broken.
    else:
        runs = await answer_soon(paths, None, lambda client: client.list_runs(_RUNS_TO_LOOK_AT)) or []
    return [run for run in runs if run.state in working]
