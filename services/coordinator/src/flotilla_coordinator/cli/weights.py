"""Implements `flotilla weights`, which shows the weights that each generator of a run holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, Stack
from flotilla_coordinator.cli.stack import client_of

if TYPE_CHECKING:
    from flotilla.coordinator.v1.coordinator_pb2 import HeldWeights, ShowWeightsResponse

app = typer.Typer(help="Weights of active runs.", no_args_is_help=True)

GIGA = 1e9


@app.callback()
def weights() -> None:
    """Keeps `show` a command of its own: a single one would otherwise take its group's place."""


@app.command()
def show(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show the version and digest of each generator of each run, and what its last sync took."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, print_table, say

    async def ask() -> list[ShowWeightsResponse]:
        async with client_of(stack, coordinator) as client:
            first = await client.show_weights()
            return [first, *[await client.show_weights(run_id) for run_id in first.run_ids[1:]]]

    shown = [_shown_json(held) for held in wait(ask())]
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
    from flotilla_coordinator.cli.output import version_text

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
    from flotilla_coordinator.cli.output import version_text

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
