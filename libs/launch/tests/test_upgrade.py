"""Which processes an upgrade starts anew, and in which order; tests/upgrade does it with real releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.launcher.v1 import launcher_pb2
from flotilla_launch.upgrade import Upgrade

GENERATOR, REWARD = reg.SERVICE_KIND_GENERATOR, reg.SERVICE_KIND_REWARD
NAMES = {
    "generator-0": GENERATOR,
    "judge-careful-0": GENERATOR,
    "judge-careful-1": GENERATOR,
    "reward-0": REWARD,
}


class Fleet:
    """A launcher and a coordinator that do at once what they are asked."""

    def __init__(self) -> None:
        self.did: list[str] = []

    async def state(self) -> launcher_pb2.ListResponse:
        ready = launcher_pb2.PROCESS_STATE_READY
        told = [launcher_pb2.ProcessStatus(name=name, kind=kind, state=ready) for name, kind in NAMES.items()]
        return launcher_pb2.ListResponse(processes=told)

    async def restart(self, name: str, executables: Path, *, timeout_s: float) -> launcher_pb2.ProcessStatus:
        self.did.append(f"restart {name}")
        return launcher_pb2.ProcessStatus(name=name, instance_id=name)

    async def drain_replica(self, replica: str) -> pb.Service:
        self.did.append(f"drain {replica}")
        return pb.Service()

    async def list_services(self) -> list[pb.Service]:
        return [
            pb.Service(
                registration=reg.Registration(name=name, instance_id=name, kind=kind),
                work_state=pb.WORK_STATE_READY,
            )
            for name, kind in NAMES.items()
        ]


@pytest.mark.parametrize(
    ("kind", "did"),
    [
        (
            GENERATOR,
            [
                "drain generator-0",
                "restart generator-0",
                "restart judge-careful-0",
                "restart judge-careful-1",
            ],
        ),
        (REWARD, ["drain reward-0", "restart reward-0"]),
    ],
)
async def test_generators_of_judges_go_with_those_of_the_policy(kind: Any, did: list[str]) -> None:
    fleet: Any = Fleet()
    upgrade = Upgrade(fleet, fleet, kind, Path("/new/bin"), 1.0, 1.0, lambda _: None)
    replaced = await upgrade.run(spare=False)
    assert fleet.did == did
    assert [one.name for one in replaced] == [name for name, of in NAMES.items() if of == kind]
