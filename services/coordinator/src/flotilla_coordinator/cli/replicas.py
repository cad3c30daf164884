"""Implements `flotilla replicas`, for generators and reward replicas as runs see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, Stack
from flotilla_coordinator.cli.stack import client_of

if TYPE_CHECKING:
    from flotilla.coordinator.v1.coordinator_pb2 import Service

app = typer.Typer(help="List replicas, and take one out of service.", no_args_is_help=True)

COLUMNS = ("NAME", "KIND", "WORK", "VERSION", "OWES TOKENS", "RUN", "WHY")


@app.command("list")
def list_(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List generators and reward replicas, and whether each receives work."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, print_table

    async def ask() -> list[Service]:
        async with client_of(stack, coordinator) as client:
            return [service for service in await client.list_services() if service.work_state]

    replicas = [replica_json(service) for service in wait(ask())]
    if as_json:
        print_json({"replicas": replicas})
        return
    keys = ("name", "kind", "work", "policy_version", "outstanding_tokens", "run_id", "why")
    print_table(COLUMNS, [tuple(str(one[key] or "") for key in keys) for one in replicas])


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(metavar="REPLICA", help="Name of its slot, or its instance id.")],
    stack: Stack = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Send a replica no more work. It finishes what it has; its process stays, and works again after a restart."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, say

    async def ask() -> Service:
        async with client_of(stack, coordinator) as client:
            return await client.drain_replica(replica)

    found = replica_json(wait(ask()))
    if as_json:
        print_json(found)
    else:
        say(f"{found['name']} gets no more work; follow it: flotilla replicas list")


def replica_json(service: Service) -> dict[str, Any]:
    """Describe one replica in the output of these commands."""
    from flotilla.coordinator.v1.coordinator_pb2 import WorkState
    from flotilla_coordinator.cli.output import version_text
    from flotilla_launch.placement import kind_name

    return {
        "name": service.registration.name,
        "kind": kind_name(service.registration.kind),
        "instance_id": service.registration.instance_id,
        "work": WorkState.Name(service.work_state).removeprefix("WORK_STATE_").lower(),
        "why": service.work_state_reason,
        "policy_version": version_text(service.live_version) if service.HasField("live_version") else None,
        "outstanding_tokens": service.outstanding_tokens,
        "run_id": service.run_id or None,
    }
