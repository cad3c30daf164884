"""`flotilla weights`: which weights each generator of the run holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, Stack
from flotilla_coordinator.cli.stack_choice import client_of

if TYPE_CHECKING:
    from flotilla.coordinator.v1.coordinator_pb2 import HeldWeights, ShowWeightsResponse

app = typer.Typer(help="Weights of the run that goes on.", no_args_is_help=True)

GIGA = 1e9


@app.callback()
def weights() -> None:
    """Keeps `show` a command of its own: a single one would otherwise take its group's place."""


@app.command()
def show(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show the version and digest of each generator, and what its last sync took."""
    from flotilla_coordinator.cli.output import print_json, print_table, say, version_text
    from flotilla_coordinator.cli.running import wait

    async def ask() -> ShowWeightsResponse:
        async with client_of(stack, coordinator) as client:
            return await client.show_weights()

    held = wait(ask())
    generators = [_held_json(one) for one in held.generators]
    trainer = version_text(held.policy_version) if held.run_id else None
    if as_json:
        print_json({"run_id": held.run_id or None, "policy_version": trainer, "generators": generators})
        return
    if not held.run_id:
        say("no run goes on: no generator holds weights of one")
        return
    say(f"run {held.run_id}: the trainer holds version {trainer}")
    rows = [
        (
            one["name"],
            one["policy_version"],
            one["digest"],
            f"{one['bytes']:,}",
            f"{one['gigabytes_per_s']:.3f}",
            f"{one['stall_s'] * 1e3:.0f} ms",
        )
        for one in generators
    ]
    print_table(("GENERATOR", "VERSION", "DIGEST", "BYTES", "GB/S", "STALL"), rows)


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
