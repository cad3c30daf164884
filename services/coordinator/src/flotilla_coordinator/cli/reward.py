"""Implements `flotilla reward`, which lists the rewards that a run may name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from flotilla_coordinator.cli.options import Coordinator, Json, Stack

if TYPE_CHECKING:
    from flotilla.reward.v1.reward_pb2 import RewardInfo

app = typer.Typer(help="Rewards that a run may name.", no_args_is_help=True)

_LIST_S = 10.0


@app.callback()
def reward() -> None:
    """Keeps `list` a command of its own: a single one would otherwise take its group's place."""


@app.command("list")
def list_(stack: Stack = None, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the rewards that the reward services know by name, with their parameters.

    A function in a file needs no entry here: name it in the run as path.py:function.
    """
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.output import print_json, print_table

    rewards = [_reward_json(found, services) for found, services in wait(_ask(stack, coordinator))]
    if as_json:
        print_json({"rewards": rewards})
        return
    rows = [
        (one["name"], ", ".join(_parameter(one, name) for name in one["parameters"]), one["description"])
        for one in rewards
    ]
    print_table(("REWARD", "PARAMETERS", "WHAT IT GIVES"), rows)


async def _ask(stack: str | None, coordinator: str | None) -> list[tuple[RewardInfo, list[str]]]:
    """Return each reward once, with the names of the services that serve it."""
    from flotilla.common.v1.registration_pb2 import SERVICE_KIND_REWARD
    from flotilla.reward.v1.reward_pb2 import ListRewardsRequest
    from flotilla.reward.v1.reward_pb2_grpc import RewardServiceStub
    from flotilla_coordinator.cli.services import find_services
    from flotilla_core import rpc
    from flotilla_core.errors import Unavailable

    found: dict[str, tuple[RewardInfo, list[str]]] = {}
    services = [
        one for one in (await find_services(stack, coordinator)).values() if one.kind == SERVICE_KIND_REWARD
    ]
    if not services:
        raise Unavailable("no reward service is running", next_step="start one: flotilla scale reward 1")
    for service in services:
        async with service.channel() as channel:
            call = RewardServiceStub(channel).ListRewards
            answer = await rpc.unary(call, ListRewardsRequest(), timeout_s=_LIST_S)
        for info in answer.rewards:
            found.setdefault(info.name, (info, []))[1].append(service.name)
    return list(found.values())


def _reward_json(info: RewardInfo, services: list[str]) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    schema = MessageToDict(info.parameters)
    return {
        "name": info.name,
        "description": " ".join(info.description.split()),
        "parameters": schema.get("properties", {}),
        "required": schema.get("required", []),
        "services": services,
    }


def _parameter(reward: dict[str, Any], name: str) -> str:
    """Show a parameter: `pattern` where it must be given, `ignore_case=false` where it has a default."""
    import json

    default = reward["parameters"][name].get("default")
    if isinstance(default, float):  # every number of a Struct is one
        return f"{name}={default:g}"
    return name if default is None else f"{name}={json.dumps(default)}"
