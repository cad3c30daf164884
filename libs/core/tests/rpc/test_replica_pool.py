"""Who gets work: the pool against real servers, one of them killed."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core import rpc
from flotilla_core.config import BindConfig
from flotilla_core.errors import Unavailable
from flotilla_core.protocol import PROTOCOL_VERSION, major_of
from flotilla_core.rpc import Load, Replica, ReplicaPool
from flotilla_core.rpc import pool as replica_pool
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_testing.credentials import ours

FOREIGN = f"{(major_of(PROTOCOL_VERSION) or 0) + 2}.0"
"""A protocol that is no neighbour of ours."""
Pool = ReplicaPool[Any]
Snapshot = dict[str, reg.Registration]

SERVER = """
import asyncio, pathlib, sys
from flotilla_core import rpc
from flotilla_core.config import BindConfig
from flotilla_core.trust import Credential

async def main():
    server = rpc.RpcServer(BindConfig(), credential=Credential(pathlib.Path(sys.argv[1])))
    address = await server.start()
    server.set_serving(True)
    print(address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def registration(name: str, address: str = "127.0.0.1:1", **fields: Any) -> reg.Registration:
    fields = {
        "kind": reg.SERVICE_KIND_GENERATOR,
        "instance_id": f"{name}-a",
        "state": reg.INSTANCE_STATE_READY,
        "protocol_version": PROTOCOL_VERSION,
        **fields,
    }
    return reg.Registration(name=name, address=address, **fields)


def snapshot(*registrations: reg.Registration) -> Snapshot:
    return {one.instance_id: one for one in registrations}


def dial(address: str) -> grpc.aio.Channel:
    return rpc.connect(address, credential=ours())


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    one: Pool = ReplicaPool(reg.SERVICE_KIND_GENERATOR, health_pb2_grpc.HealthStub, dial)
    yield one
    await one.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[rpc.RpcServer, str]]:
    one = rpc.RpcServer(BindConfig(), credential=ours())
    address = await one.start()
    one.set_serving(True)
    yield one, address
    await one.stop(0)


def names(pool: Pool) -> set[str]:
    return {replica.name for replica in pool.replicas()}


@asynccontextmanager
async def lease(pool: Pool, cost: int = 1, **wish: Any) -> AsyncIterator[Replica[Any]]:
    """A replica that works inside the block."""
    replica = await pool.acquire(Load(cost), **{"timeout_s": 0, "what": "a generator", **wish})
    try:
        yield replica
    finally:
        pool.release(replica, Load(cost))


async def check(replica: Replica[Any]) -> None:
    await rpc.unary(replica.stub.Check, health_pb2.HealthCheckRequest(), timeout_s=5, attempts=1)


async def test_only_ready_instances_of_the_kind_get_work(pool: Pool) -> None:
    await pool.update(
        snapshot(
            registration("generator-0"),
            registration("generator-1", state=reg.INSTANCE_STATE_STARTING),
            registration("reward-0", kind=reg.SERVICE_KIND_REWARD),
            registration("generator-2", protocol_version=FOREIGN),
        )
    )
    assert names(pool) == {"generator-0"}


async def test_work_goes_to_the_least_loaded_and_equals_take_turns(pool: Pool) -> None:
    await pool.update(snapshot(registration("generator-0"), registration("generator-1")))
    async with lease(pool, 100) as loaded, lease(pool, 10) as other:
        assert loaded is not other
        for _ in range(3):
            async with lease(pool) as third:
                assert third is other
    assert [replica.outstanding for replica in pool.replicas()] == [0, 0]
    taken: list[str] = []
    for _ in range(4):
        async with lease(pool) as replica:
            taken.append(replica.name)
    assert sorted(taken[:2]) == sorted(taken[2:]) == ["generator-0", "generator-1"]


async def test_work_follows_what_each_replica_carries() -> None:
    pool: Pool = ReplicaPool(reg.SERVICE_KIND_GENERATOR, health_pb2_grpc.HealthStub, dial)
    large = registration("large", capacity={"running_samples": 300})
    small = registration("small", capacity={"running_samples": 100})
    await pool.update(snapshot(large, small))
    taken = [(await pool.acquire(Load(10), timeout_s=1, what="a generator")).name for _ in range(40)]
    assert (taken.count("large"), taken.count("small")) == (30, 10)
    await pool.close()


@pytest.fixture
async def bounded() -> AsyncIterator[Pool]:
    """Replicas take one and a quarter of what they run side by side."""
    one: Pool = ReplicaPool(reg.SERVICE_KIND_GENERATOR, health_pb2_grpc.HealthStub, dial)
    yield one
    await one.close()


async def begun(waiting: asyncio.Task[Any]) -> None:
    """Until it waits."""
    await asyncio.sleep(0)
    assert not waiting.done()


async def test_what_would_only_wait_at_a_full_replica_goes_to_the_one_that_comes(bounded: Pool) -> None:
    first = registration("generator-0", capacity={"running_samples": 8})
    await bounded.update(snapshot(first))
    group = Load(100, places=5)
    taken = [await bounded.acquire(group, timeout_s=1, what="a generator") for _ in range(2)]
    waiting = asyncio.create_task(bounded.acquire(group, timeout_s=1, what="a generator"))
    await begun(waiting)
    await bounded.update(snapshot(first, registration("generator-1", capacity={"running_samples": 8})))
    assert [one.name for one in taken] == ["generator-0"] * 2
    assert (await asyncio.wait_for(waiting, 1)).name == "generator-1"


async def test_room_goes_to_the_lowest_priority_and_then_to_who_came_first(bounded: Pool) -> None:
    await bounded.update(snapshot(registration("generator-0", capacity={"running_samples": 4})))
    group = Load(1, places=5)
    replica = await bounded.acquire(group, timeout_s=1, what="a generator")
    served: list[str] = []

    async def ask(name: str, priority: int) -> None:
        taken = await bounded.acquire(group, timeout_s=1, what="a generator", priority=priority)
        served.append(name)
        bounded.release(taken, group)

    asking = [
        asyncio.create_task(ask(name, priority))
        for name, priority in (("step 3", 3), ("step 2", 2), ("step 2 again", 2), ("evaluation", -1))
    ]
    await asyncio.sleep(0)
    bounded.release(replica, group)
    await asyncio.wait_for(asyncio.gather(*asking), 5)
    assert served == ["evaluation", "step 2", "step 2 again", "step 3"]


async def test_a_replica_where_work_waits_gets_no_more_of_it(bounded: Pool) -> None:
    await bounded.update(snapshot(registration("generator-0", capacity={"running_samples": 100})))
    group = Load(1, places=10)
    taken = [await bounded.acquire(group, timeout_s=1, what="a generator") for _ in range(4)]
    replica = taken[0]
    bounded.heard(replica, 20)  # of 40: its cache holds no more
    waiting = asyncio.create_task(bounded.acquire(group, timeout_s=1, what="a generator"))
    await begun(waiting)
    bounded.release(replica, group)
    await begun(waiting)
    bounded.release(replica, group)
    assert await asyncio.wait_for(waiting, 1) is replica
    waiting = asyncio.create_task(bounded.acquire(group, timeout_s=1, what="a generator"))
    await begun(waiting)
    bounded.heard(replica, 0)
    assert await asyncio.wait_for(waiting, 1) is replica


async def test_work_of_one_affinity_goes_where_it_went_last_while_there_is_room(bounded: Pool) -> None:
    capacity = {"running_samples": 4}
    both = [registration(name, capacity=capacity) for name in ("generator-0", "generator-1")]
    await bounded.update(snapshot(*both))

    async def turn(affinity: str) -> Replica[Any]:
        return await bounded.acquire(Load(1, places=3), timeout_s=1, what="a generator", affinity=affinity)

    first, other = await turn("a"), await turn("b")
    assert first is not other
    group = Load(1, places=3)
    bounded.release(other, group)
    assert await turn("a") is first  # though the other one is free
    assert first.full
    assert await turn("a") is other
    for _ in range(2):
        bounded.release(first, group)
    assert await turn("a") is other


async def test_patience_is_for_replicas_not_for_room(bounded: Pool) -> None:
    await bounded.update(snapshot(registration("generator-0", capacity={"running_samples": 4})))
    group = Load(1, places=5)
    replica = await bounded.acquire(group, timeout_s=1, what="a generator")
    patient = asyncio.create_task(bounded.acquire(group, timeout_s=0.01, what="a generator"))
    hopeless = bounded.acquire(group, allowed=lambda _: False, timeout_s=0.01, what="a miracle")
    with pytest.raises(Unavailable, match=r"waited 0.01 s for a miracle"):
        await hopeless
    assert not patient.done()
    bounded.release(replica, group)
    assert await asyncio.wait_for(patient, 1) is replica


async def test_patience_begins_when_the_last_replica_that_could_serve_is_gone(bounded: Pool) -> None:
    await bounded.update(snapshot(registration("generator-0", capacity={"running_samples": 4})))
    group = Load(1, places=5)
    replica = await bounded.acquire(group, timeout_s=1, what="a generator")
    waiting = asyncio.create_task(bounded.acquire(group, timeout_s=0.01, what="a generator"))
    await begun(waiting)
    bounded.drain(replica.instance_id, "drained by a user")
    with pytest.raises(Unavailable, match=r"waited 0.01 s for a generator"):
        await asyncio.wait_for(waiting, 5)


async def test_a_draining_replica_gets_nothing_new_and_keeps_what_it_has(
    pool: Pool, server: tuple[rpc.RpcServer, str]
) -> None:
    ready = registration("generator-0", server[1])
    await pool.update(snapshot(ready))
    replica = await pool.acquire(Load(1), timeout_s=1, what="a generator")
    await pool.update(snapshot(registration("generator-0", server[1], state=reg.INSTANCE_STATE_DRAINING)))
    with pytest.raises(Unavailable, match="generator-0 is draining"):
        await pool.acquire(Load(1), timeout_s=0, what="a generator")
    await pool.update({})
    await check(replica)
    pool.release(replica, Load(1))


async def test_a_drained_replica_gets_nothing_new_until_its_process_is_another_one(
    pool: Pool, server: tuple[rpc.RpcServer, str]
) -> None:
    ready = registration("generator-0", server[1])
    await pool.update(snapshot(ready))
    replica = await pool.acquire(Load(1), timeout_s=1, what="a generator")
    pool.drain(replica.instance_id, "drained by a user")
    await pool.update(snapshot(ready))
    with pytest.raises(Unavailable, match=r"generator-0 is draining \(drained by a user\)"):
        await pool.acquire(Load(1), timeout_s=0, what="a generator")
    await check(replica)
    pool.release(replica, Load(1))
    later = registration("generator-0", server[1], instance_id="generator-0-b")
    later.started_at.FromSeconds(9)
    await pool.update(snapshot(later))
    assert [one.instance_id for one in pool.replicas()] == ["generator-0-b"]


async def test_allowed_chooses_among_the_ready(pool: Pool) -> None:
    await pool.update(snapshot(registration("generator-0"), registration("generator-1")))
    async with lease(pool, allowed=lambda replica: replica.name == "generator-1") as replica:
        assert replica.name == "generator-1"
    with pytest.raises(Unavailable, match=r"generator-0 is ready, generator-1 is ready"):
        await pool.acquire(Load(1), allowed=lambda replica: False, timeout_s=0, what="a miracle")


async def test_acquire_gets_the_replica_that_arrives_while_it_waits(pool: Pool) -> None:
    waiting = asyncio.create_task(pool.acquire(Load(1), timeout_s=10, what="a generator"))
    await asyncio.sleep(0)
    await pool.update(snapshot(registration("generator-0")))
    assert (await asyncio.wait_for(waiting, 1)).name == "generator-0"


async def test_a_caller_who_is_cancelled_with_a_replica_in_hand_gives_it_back(pool: Pool) -> None:
    waiting = asyncio.create_task(pool.acquire(Load(1), timeout_s=10, what="a generator"))
    await asyncio.sleep(0)
    await pool.update(snapshot(registration("generator-0")))
    assert [replica.outstanding for replica in pool.replicas()] == [1]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [(replica.outstanding, replica.leases) for replica in pool.replicas()] == [(0, 0)]


async def test_who_cannot_be_served_holds_up_nobody_who_can(pool: Pool) -> None:
    def never(replica: Replica[Any]) -> bool:
        return False

    first = asyncio.create_task(pool.acquire(Load(1), allowed=never, timeout_s=10, what="a miracle"))
    second = asyncio.create_task(pool.acquire(Load(1), timeout_s=10, what="a generator"))
    await asyncio.sleep(0)
    await pool.update(snapshot(registration("generator-0")))
    assert (await asyncio.wait_for(second, 1)).name == "generator-0"
    first.cancel()


async def test_what_allows_a_replica_is_asked_again_without_any_change(pool: Pool) -> None:
    await pool.update(snapshot(registration("generator-0")))
    answers = itertools.chain([False, False], itertools.repeat(True))
    replica = await pool.acquire(Load(1), allowed=lambda _: next(answers), timeout_s=10, what="a generator")
    assert replica.name == "generator-0"


async def test_a_wait_that_fails_says_what_for_and_who_is_there(pool: Pool) -> None:
    await pool.update(snapshot(registration("generator-0")))
    with pytest.raises(Unavailable, match=r"waited 0\.1 s for two generators: generator-0 is ready"):
        await pool.wait_for(2, 0.1, "two generators")
    pool.eject("generator-0-a", "it hung up")
    with pytest.raises(Unavailable, match=r"generator-0 is ejected \(it hung up\)"):
        await pool.acquire(Load(1), timeout_s=0.1, what="a generator")


async def test_a_long_wait_is_told_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pool, "NAME_THE_WAIT_AFTER_S", 0.0)
    told: asyncio.Queue[str] = asyncio.Queue()
    one: Pool = ReplicaPool(
        reg.SERVICE_KIND_GENERATOR, health_pb2_grpc.HealthStub, dial, on_wait=told.put_nowait
    )
    wait = asyncio.create_task(one.wait_for(1, 60.0, "a generator"))
    async with asyncio.timeout(5):
        text = await told.get()
    assert text == "waiting for a generator, for at most 60 s more: no generator is available"
    await one.update(snapshot(registration("generator-0")))
    async with asyncio.timeout(5):
        await wait
    assert told.empty(), "once is enough"
    await one.close()


async def test_a_wait_that_finds_nobody_names_who_was_refused_and_both_protocols(pool: Pool) -> None:
    await pool.update(snapshot(registration("generator-0", protocol_version=FOREIGN)))
    refused = re.escape(
        f"refused: generator-0-a speaks protocol {FOREIGN}, this build speaks {PROTOCOL_VERSION}"
    )
    with pytest.raises(Unavailable, match=rf"for a generator: {refused}"):
        await pool.wait_for(1, 0.1, "a generator")
    await pool.update({})
    with pytest.raises(Unavailable, match="for a generator: no generator is available"):
        await pool.wait_for(1, 0.1, "a generator")


async def test_an_ejected_replica_comes_back_once_its_health_serves(
    pool: Pool, server: tuple[rpc.RpcServer, str]
) -> None:
    server[0].set_serving(False)
    await pool.update(snapshot(registration("generator-0", server[1])))
    pool.eject("generator-0-a", "a call failed")
    # A new snapshot is no proof of health.
    await pool.update(snapshot(registration("generator-0", server[1])))
    with pytest.raises(Unavailable):
        await pool.wait_for(1, 0.8, "a generator")
    server[0].set_serving(True)
    await pool.wait_for(1, 5, "a generator")
    await check(pool.replicas()[0])


async def test_a_restarted_slot_replaces_the_old_process_at_once(pool: Pool) -> None:
    old = registration("generator-0", "127.0.0.1:1")
    old.started_at.FromSeconds(1000)
    new = registration("generator-0", "127.0.0.1:2", instance_id="generator-0-b")
    new.started_at.FromSeconds(2000)
    await pool.update(snapshot(old))
    await pool.update(snapshot(old, new))
    assert [replica.instance_id for replica in pool.replicas()] == ["generator-0-b"]


async def test_a_killed_replica_is_noticed_by_the_failing_call(
    pool: Pool, server: tuple[rpc.RpcServer, str]
) -> None:
    group = await ProcessGroup.start(
        [sys.executable, "-c", SERVER, str(ours().path)], stdout=asyncio.subprocess.PIPE
    )
    assert group.process.stdout is not None
    address = (await asyncio.wait_for(group.process.stdout.readline(), 20)).decode().strip()
    both = snapshot(registration("generator-0", address), registration("generator-1", server[1]))
    await pool.update(both)
    victim = next(replica for replica in pool.replicas() if replica.name == "generator-0")
    await check(victim)
    await group.kill()

    answered: list[str] = []
    async with asyncio.timeout(5):
        while len(answered) < 10:
            async with lease(pool) as replica:
                try:
                    await check(replica)
                    answered.append(replica.name)
                except Unavailable as error:
                    pool.eject(replica.instance_id, str(error))
    assert set(answered) == {"generator-1"}
    # The registry still lists it: that alone brings nothing back.
    await pool.update(both)
    assert names(pool) == {"generator-1"}


async def test_who_serves_keeps_its_work_when_its_heartbeats_are_lost(
    pool: Pool, server: tuple[rpc.RpcServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla_core.rpc.replica_set.ASK_MISSING_EVERY_S", 0.01)
    ready = registration("generator-0", server[1])
    await pool.update(snapshot(ready))
    (replica,) = pool.replicas()
    await pool.update({})
    for _ in range(3):
        await check(replica)
        assert pool.replicas() == [replica]
    server[0].set_serving(False)
    async with asyncio.timeout(5):
        while pool.everyone():
            await asyncio.sleep(0.01)


async def test_who_left_the_registry_and_does_not_answer_ends_the_calls_that_wait_for_it(
    pool: Pool, server: tuple[rpc.RpcServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla_core.rpc.replica_set.MISSING_TIMEOUT_S", 0.5)
    group = await ProcessGroup.start(
        [sys.executable, "-c", SERVER, str(ours().path)], stdout=asyncio.subprocess.PIPE
    )
    try:
        assert group.process.stdout is not None
        address = (await asyncio.wait_for(group.process.stdout.readline(), 20)).decode().strip()
        other = registration("generator-1", server[1])
        await pool.update(snapshot(registration("generator-0", address), other))
        first = "generator-0"
        stopped = await pool.acquire(Load(1), allowed=lambda one: one.name == first, timeout_s=1, what="it")
        await check(stopped)
        group.signal(signal.SIGSTOP)
        request = health_pb2.HealthCheckRequest()
        waiting = asyncio.create_task(rpc.unary(stopped.stub.Check, request, timeout_s=60, attempts=1))
        await pool.update(snapshot(other))
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, 5)
        pool.release(stopped, Load(1))
        assert names(pool) == {"generator-1"}
    finally:
        await group.kill()


async def test_a_replica_is_busy_as_long_as_it_has_any_lease(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("flotilla_core.rpc.replica_set.time", SimpleNamespace(monotonic=lambda: now[0]))
    await pool.update(snapshot(registration("generator-0")))
    (replica,) = pool.replicas()
    async with lease(pool):
        now[0] = 103.0
        async with lease(pool):
            now[0] = 104.0
        assert replica.busy_s == 4.0
        now[0] = 105.0
    now[0] = 200.0
    assert replica.busy_s == 5.0
    async with lease(pool):
        now[0] = 201.0
        assert replica.busy_s == 6.0
