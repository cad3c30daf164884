"""Which replica may be taken out of service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_coordinator.fleet import Fleet
from flotilla_core import rpc
from flotilla_core.errors import FailedPrecondition, NotFound


class ConnectingHost:
    """All that a fleet asks of its host before it follows the registry."""

    connect = staticmethod(rpc.connect)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    one = Fleet(ConnectingHost())  # type: ignore[arg-type]
    yield one
    await one.stop()


async def register(fleet: Fleet, *names: str) -> None:
    snapshot = {
        f"{name}-a": reg.Registration(
            kind=reg.SERVICE_KIND_REWARD if name.startswith("reward") else reg.SERVICE_KIND_GENERATOR,
            name=name,
            instance_id=f"{name}-a",
            address="127.0.0.1:1",
            state=reg.INSTANCE_STATE_READY,
            protocol_version="1.0",
        )
        for name in names
    }
    for pool in (fleet.generators, fleet.rewards):
        await pool.update(snapshot)


async def test_a_replica_is_drained_by_name_or_instance_and_the_others_work_on(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "generator-1", "reward-0", "reward-1")
    assert fleet.drain("generator-1", busy=True).state == "draining"
    assert fleet.drain("reward-0-a", busy=True).name == "reward-0"
    assert fleet.drain("generator-1", busy=True).why == "drained by a user"
    assert [one.name for one in fleet.generators.replicas()] == ["generator-0"]
    assert [one.name for one in fleet.rewards.replicas()] == ["reward-1"]


async def test_the_last_generator_of_a_run_stays_in_service(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "reward-0")
    with pytest.raises(FailedPrecondition, match="the only generator"):
        fleet.drain("generator-0", busy=True)
    assert [one.name for one in fleet.generators.replicas()] == ["generator-0"]
    assert fleet.drain("generator-0", busy=False).state == "draining"


async def test_what_is_no_replica_is_not_found(fleet: Fleet) -> None:
    await register(fleet, "generator-0")
    with pytest.raises(NotFound, match="'trainer'"):
        fleet.drain("trainer", busy=False)
