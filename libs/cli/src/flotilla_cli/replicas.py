"""Implements `flotilla replicas` and `flotilla weights`: replicas as runs see them, and the weights that they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.coordinator.v1.coordinator_pb2 import HeldWeights, Service, ShowWeightsResponse, WorkState
from flotilla_cli.options import Coordinator, Json, Stack
from flotilla_cli.output import print_json, print_table, say, version_text
from flotilla_cli.stack import call
from flotilla_core.kinds import kind_name

if TYPE_CHECKING:
    from flotilla_client import Client

app = typer.Typer(help="List replicas, and take one out of service.", no_args_is_help=True)
weights_app = typer.Typer(help="Weights of active runs.", no_args_is_help=True)

COLUMNS = ("NAME", "KIND", "WORK", "VERSION", "OWES TOKENS", "RUN", "WHY")
ASLEEP = "asleep during the update"
GIGA = 1e9


@app.command("list")
def list_(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List generators and reward replicas, and whether each receives work."""
    services = call(lambda client: client.list_services(), stack, coordinator)
    replicas = [replica_json(service) for service in services if service.work_state]
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
    found = replica_json(call(lambda client: client.drain_replica(replica), stack, coordinator))
    if as_json:
        print_json(found)
    else:
        say(f"{found['name']} gets no more work; follow it: flotilla replicas list")


def replica_json(service: Service) -> dict[str, Any]:
    """Describe one replica in the output of these commands."""
    return {
        "name": service.registration.name,
        "kind": kind_name(service.registration.kind),
        "instance_id": service.registration.instance_id,
        "work": WorkState.Name(service.work_state).removeprefix("WORK_STATE_").lower(),
        "why": service.work_state_reason or (ASLEEP if service.asleep else ""),
        "policy_version": version_text(service.live_version) if service.HasField("live_version") else None,
        "asleep": service.asleep,
        "outstanding_tokens": service.outstanding_tokens,
        "run_id": service.run_id or None,
    }


@weights_app.callback()
def weights() -> None:
    """Keeps `show` a command of its own: a single one would otherwise take its group's place."""


@weights_app.command()
def show(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show the version and digest of each generator of each run, and what its last sync took."""

    async def of_each_run(client: Client) -> list[ShowWeightsResponse]:
        first = await client.show_weights()
        return [first, *[await client.show_weights(run_id) for run_id in first.run_ids[1:]]]

    shown = [_shown_json(held) for held in call(of_each_run, stack, coordinator)]
    if as_json:
        print_json({**shown[0], "runs": [one for one in shown if one["run_id"]]})
        return
    if not shown[0]["run_id"]:
        say("no run is active")
    for one in shown:
        if one["run_id"]:
            say(f"run {one['run_id']}: the trainer holds version {one['policy_version']}")
            print_table(
                ("GENERATOR", "VERSION", "DIGEST", "BYTES", "GB/S", "STALL"), map(_row, one["generators"])
            )


def _shown_json(held: ShowWeightsResponse) -> dict[str, Any]:
    return {
        "run_id": held.run_id or None,
        "policy_version": version_text(held.policy_version) if held.run_id else None,
        "generators": [_held_json(one) for one in held.generators],
    }


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["name"],
        one["policy_version"],
        one["digest"],
        f"{one['bytes']:,}",
        f"{one['gigabytes_per_s']:.3f}",
        f"{one['stall_s'] * 1e3:.0f} ms",
    )


def _held_json(held: HeldWeights) -> dict[str, Any]:
    stage_s = held.stage.ToNanoseconds() / 1e9
    return {
        "name": held.name,
        "instance_id": held.instance_id,
        "policy_version": version_text(held.version),
        "digest": held.digest,
        "bytes": held.bytes,
        "stage_s": stage_s,
        "gigabytes_per_s": held.bytes / stage_s / GIGA if stage_s > 0 else 0.0,
        "stall_s": held.stall.ToNanoseconds() / 1e9,
    }
