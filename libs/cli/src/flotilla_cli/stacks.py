"""Implements the commands that ask one service itself: `flotilla stacks`, `flotilla profile` and `flotilla drain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flotilla.common.v1.operate_pb2 import (
    Activity,
    DrainRequest,
    DumpStacksRequest,
    DumpStacksResponse,
    GetActivityRequest,
    ProfileRequest,
)
from flotilla_cli.options import Coordinator, Json, Stack, make_folder_of, wait
from flotilla_cli.output import age, print_json, print_line, say
from flotilla_cli.services import find_service, is_kept_up
from flotilla_core import rpc
from flotilla_core.errors import FailedPrecondition

ServiceName = Annotated[str, typer.Argument(metavar="SERVICE", help="Name of a service, as `ps` shows it.")]

_STACKS_S = 30.0
_SLACK_S = 30.0
_DRAIN_S = 10.0


def stacks(
    service: ServiceName, stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False
) -> None:
    """Show what a service is doing, and the stack of every thread and task of it, of its ranks too."""
    activities, processes = wait(_ask(service, stack, coordinator))
    if as_json:
        doing = [
            {"what": one.what, "since": one.since.ToJsonString(), "run_id": one.run_id or None}
            for one in activities
        ]
        shown = [{"process": one.process, "pid": one.pid, "stacks": one.text} for one in processes.processes]
        print_json({"service": service, "activities": doing, "processes": shown})
        return
    for activity in activities:
        run = f" (run {activity.run_id})" if activity.run_id else ""
        print_line(f"for {age(activity.since)}: {activity.what}{run}")
    for process in processes.processes:
        print_line(f"\n=== {service} {process.process}, pid {process.pid}\n{process.text.rstrip()}")


def profile(
    service: ServiceName,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=120, help="How long to sample.")] = 10.0,
    rate: Annotated[int, typer.Option("--rate", min=1, max=1000, help="Samples per second.")] = 100,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Sample the stacks of a service for a while, and write them for a flame graph (collapsed stacks)."""
    make_folder_of(output)
    say(f"sampling {service} for {seconds:g} s")
    collapsed = wait(_sample(service, seconds, rate, stack, coordinator))
    output.write_text(collapsed + "\n")
    if as_json:
        print_json({"service": service, "file": str(output.absolute())})
    else:
        say(f"wrote {output}; open it in https://www.speedscope.app")


def drain(
    service: ServiceName,
    grace: Annotated[
        float, typer.Option("--grace", min=0, max=86400, help="How many seconds running work may take.")
    ] = 60.0,
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """End a service that no launcher of this machine started, once it has finished what it has.

    For one that was started by hand, here or on another machine. `flotilla replicas drain` only sends a replica no more
    work: its process stays. To end services that the launcher started: `flotilla scale`, `flotilla down`.
    """
    wait(_drain(service, grace, stack, coordinator))
    if as_json:
        print_json({"service": service, "grace_s": grace})
    else:
        say(f"{service} finishes what it has, for at most {grace:g} s, and ends")


async def _ask(
    name: str, stack: str | None, coordinator: str | None
) -> tuple[list[Activity], DumpStacksResponse]:
    async with (await find_service(name, stack, coordinator)).operated() as stub:
        doing = await rpc.unary(stub.GetActivity, GetActivityRequest(), timeout_s=_STACKS_S)
        return list(doing.activities), await rpc.unary(
            stub.DumpStacks, DumpStacksRequest(), timeout_s=_STACKS_S
        )


async def _sample(name: str, seconds: float, rate: int, stack: str | None, coordinator: str | None) -> str:
    request = ProfileRequest(samples_per_second=rate)
    request.duration.FromMilliseconds(int(seconds * 1000))
    async with (await find_service(name, stack, coordinator)).operated() as stub:
        answer = await rpc.unary(stub.Profile, request, timeout_s=seconds + _SLACK_S, attempts=1)
        return answer.collapsed_stacks


async def _drain(name: str, grace_s: float, stack: str | None, coordinator: str | None) -> None:
    kept = FailedPrecondition(
        f"{name} would not stay away",
        why="the launcher of this machine started it, and starts it again when it ends",
        next_step="end replicas with flotilla scale, and the whole stack with flotilla down",
    )
    # By name first: this machine need not reach what its launcher has placed elsewhere.
    if coordinator is None and await is_kept_up(stack, name=name):
        raise kept
    service = await find_service(name, stack, coordinator)
    if await is_kept_up(stack, address=service.address):
        raise kept
    request = DrainRequest()
    request.grace.FromMilliseconds(int(grace_s * 1000))
    async with service.operated() as stub:
        # The service may end before a second attempt, which would then fail although the first was heard.
        await rpc.unary(stub.Drain, request, timeout_s=_DRAIN_S, attempts=1)
