"""The fleet leases services to runs, and decides which replica may be taken out of service."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_coordinator.fleet.fleet import Fleet, ResourceRequest
from flotilla_coordinator.fleet.leases import LeaseFile
from flotilla_core import rpc
from flotilla_core.config import FleetJudgeConfig
from flotilla_core.errors import FailedPrecondition, NotFound, Unavailable
from flotilla_core.protocol import PROTOCOL_VERSION, major_of
from flotilla_core.roles import POLICY, role_of_process
from flotilla_core.rpc import Load
from flotilla_testing.credentials import credential

KINDS = {
    "judge": reg.SERVICE_KIND_GENERATOR,
    "trainer": reg.SERVICE_KIND_TRAINER,
    "teacher": reg.SERVICE_KIND_TRAINER,
    "generator": reg.SERVICE_KIND_GENERATOR,
    "reward": reg.SERVICE_KIND_REWARD,
}
LOAD = Load(1)
FOREIGN = f"{(major_of(PROTOCOL_VERSION) or 0) + 2}.0"
"""A protocol that is no neighbour of ours."""


@pytest.fixture
async def new_fleet(tmp_path: Path) -> AsyncIterator[Callable[[], Fleet]]:
    """Each call is one more coordinator on the same state."""
    made: list[Fleet] = []

    def new() -> Fleet:
        judges = {"careful": FleetJudgeConfig(model="models/judge")}
        stack = SimpleNamespace(ready_timeout_s=60.0, judges=judges)
        host: Any = SimpleNamespace(
            stack=stack, state_dir=tmp_path, connect=partial(rpc.connect, credential=credential(tmp_path))
        )
        made.append(Fleet(host, lambda: True))
        return made[-1]

    yield new
    for one in made:
        await one.close()


@pytest.fixture
def fleet(new_fleet: Callable[[], Fleet]) -> Fleet:
    return new_fleet()


async def register(fleet: Fleet, *names: str, **states: reg.InstanceState.ValueType) -> None:
    """All that there is now; a name may say which process of its slot it is: `generator-0/b`."""
    snapshot = {
        name: reg.Registration(
            kind=KINDS[name.partition("-")[0]],
            name=name.partition("/")[0],
            instance_id=name,
            address="127.0.0.1:1",
            state=states.get(name.replace("-", "_"), reg.INSTANCE_STATE_READY),
            protocol_version=PROTOCOL_VERSION,
            role=role_of_process(name.partition("/")[0]),
        )
        for name in names
    }
    await fleet.see(snapshot)


async def register_another_build(fleet: Fleet, *names: str) -> None:
    """Beside what there is now."""
    others = {
        name: reg.Registration(
            kind=KINDS[name.partition("-")[0]],
            name=name,
            instance_id=name,
            address="127.0.0.1:1",
            state=reg.INSTANCE_STATE_READY,
            protocol_version=FOREIGN,
        )
        for name in names
    }
    await fleet.see({**fleet.registrations, **others})


def generators(fleet: Fleet, run_id: str) -> list[str]:
    return sorted(one.name for one in fleet.runs[run_id].generators.replicas())


async def test_generators_of_a_judge_are_leased_to_nobody_and_every_run_that_asks_it_finds_them(
    fleet: Fleet,
) -> None:
    judged = ResourceRequest(judges=("careful", "behind_an_endpoint"))
    await register(fleet, "trainer-0", "trainer-1", "judge-careful", "generator-0", "reward-0")
    first = await fleet.admit("first", judged)
    assert generators(fleet, "first") == ["generator-0"] and [*first.judges] == ["careful"]
    assert [one.name for one in await first.judge("careful", 1.0)] == ["judge-careful"]
    with pytest.raises(FailedPrecondition, match="there is no generator for another run: 1 for run first"):
        fleet.require_place(judged)
    (holder,) = [fleet.holder(one) for one in fleet.registrations.values() if one.name == "judge-careful"]
    assert holder == ""


async def test_a_run_waits_for_its_judge_by_name_and_takes_the_process_that_replaced_a_dead_one(
    fleet: Fleet,
) -> None:
    await register(fleet, "trainer-0", "generator-0")
    run = await fleet.admit("first", ResourceRequest(judges=("careful",)))
    with pytest.raises(Unavailable, match=r"waited 0.1 s for judge careful.*no judge-careful is available"):
        await run.judge("careful", 0.1)
    await register(fleet, "trainer-0", "generator-0", "judge-careful/a")
    assert [one.instance_id for one in await run.judge("careful", 1.0)] == ["judge-careful/a"]
    run.doubt_judge("careful", "it did not answer")
    assert run.judges["careful"].replicas() == []


async def test_a_run_has_all_generators_until_another_one_takes_its_share(fleet: Fleet) -> None:
    await register(fleet, "trainer-0", "trainer-1", "generator-0", "generator-1", "generator-2", "reward-0")
    first = await fleet.admit("first", ResourceRequest())
    assert len(generators(fleet, "first")) == 3
    fleet.require_place(ResourceRequest())
    second = await fleet.admit("second", ResourceRequest())
    assert (generators(fleet, "first"), generators(fleet, "second")) == (
        ["generator-0", "generator-1"],
        ["generator-2"],
    )
    gangs = [(await run.gang(POLICY, 5.0)).name for run in (first, second)]
    assert sorted(gangs) == ["trainer-0", "trainer-1"]
    assert [one.name for one in first.rewards.replicas()] == ["reward-0"]
    with pytest.raises(
        FailedPrecondition, match=f"run first is using {gangs[0]}, run second is using {gangs[1]}"
    ):
        fleet.require_place(ResourceRequest())
    await first.close()
    assert len(generators(fleet, "second")) == 3
    fleet.require_place(ResourceRequest())


async def test_a_generator_changes_hands_when_its_last_group_has_ended_and_no_weights_move(
    fleet: Fleet,
) -> None:
    await register(fleet, "generator-0", "generator-1")
    first = await fleet.admit("first", ResourceRequest())
    moving = {"generator-1"}
    let_go: list[str] = []
    user: Any = SimpleNamespace(moves_weights_to=moving.__contains__, let_go=let_go.append)
    first.users.append(user)
    first.weight_mover = user
    taken = await first.generators.acquire(
        LOAD, allowed=lambda one: one.name == "generator-1", timeout_s=1, what="it"
    )
    await fleet.admit("second", ResourceRequest())
    assert let_go == ["generator-1"] and generators(fleet, "first") == ["generator-0"]
    assert taken.why == "another run is to have it" and generators(fleet, "second") == []
    first.generators.release(taken, LOAD)
    await fleet.settle()
    assert generators(fleet, "second") == []
    moving.clear()
    await fleet.settle()
    assert generators(fleet, "second") == ["generator-1"]


async def test_a_generator_that_was_to_leave_works_again_where_the_run_that_was_to_have_it_is_gone(
    fleet: Fleet,
) -> None:
    await register(fleet, "generator-0", "generator-1")
    first = await fleet.admit("first", ResourceRequest())
    taken = await first.generators.acquire(
        LOAD, allowed=lambda one: one.name == "generator-1", timeout_s=1, what="it"
    )
    second = await fleet.admit("second", ResourceRequest())
    assert generators(fleet, "first") == ["generator-0"]
    await second.close()
    first.generators.release(taken, LOAD)
    await fleet.settle()
    assert generators(fleet, "first") == ["generator-0", "generator-1"]


async def test_a_run_whose_only_generator_is_away_gets_another_one_sooner_than_one_that_has_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("flotilla_coordinator.fleet.leases.time.monotonic", lambda: now)
    await register(fleet, "generator-0", "generator-1", "generator-2")
    await fleet.admit("first", ResourceRequest(most_generators=1))
    await fleet.admit("second", ResourceRequest())
    await register(fleet, "generator-1", "generator-2")
    held = {"generator-0": "first", "generator-1": "second", "generator-2": "second"}
    assert fleet.generators.held == held
    now += 21.0
    await fleet.settle()
    assert fleet.generators.held == {"generator-1": "second", "generator-2": "first"}


async def test_a_coordinator_that_was_replaced_leaves_what_the_next_one_wrote(tmp_path: Path) -> None:
    owns = True
    file = LeaseFile(tmp_path / "leases.json", lambda: owns)
    file.write({"gangs": {"trainer": "run"}, "generators": {}})
    owns = False
    file.write({"gangs": {}, "generators": {}})
    assert LeaseFile(tmp_path / "leases.json", lambda: True).had("gangs", "run") == ["trainer"]


async def test_a_slot_stays_with_its_run_while_its_process_is_started_again(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "generator-1", "generator-2")
    await fleet.admit("first", ResourceRequest())
    await fleet.admit("second", ResourceRequest())
    await register(fleet, "generator-0", "generator-1")
    assert fleet.generators.held["generator-2"] == "second"
    await register(fleet, "generator-0", "generator-1", "generator-2/b")
    assert "generator-2" in generators(fleet, "second") and len(generators(fleet, "first")) == 2
    # One that leaves in order does not come back: the other run's are shared.
    await register(
        fleet, "generator-0", "generator-1", "generator-2/b", **{"generator_2/b": reg.INSTANCE_STATE_DRAINING}
    )
    assert generators(fleet, "second") == ["generator-1"]


async def test_a_run_that_needs_no_samples_leaves_the_generators_alone(fleet: Fleet) -> None:
    await register(fleet, "trainer-0", "trainer-1", "generator-0")
    await fleet.admit("samples", ResourceRequest())
    fleet.require_place(ResourceRequest(generates=False))
    await fleet.admit("answers", ResourceRequest(generates=False))
    assert generators(fleet, "samples") == ["generator-0"] and generators(fleet, "answers") == []
    await register(fleet, "trainer-0", "trainer-1", "trainer-2", "generator-0")
    with pytest.raises(FailedPrecondition, match="no generator for another run: 1 for run samples"):
        fleet.require_place(ResourceRequest())


async def test_a_generator_of_another_protocol_is_dealt_to_no_run_and_named_to_who_finds_no_other(
    fleet: Fleet,
) -> None:
    await register(fleet, "trainer-0", "trainer-1", "generator-0")
    await register_another_build(fleet, "generator-1")
    await fleet.admit("first", ResourceRequest())
    refused = re.escape(f"generator-1 speaks protocol {FOREIGN}, this build speaks {PROTOCOL_VERSION}")
    with pytest.raises(
        FailedPrecondition, match=rf"no generator for another run: 1 for run first.*{refused}"
    ):
        fleet.require_place(ResourceRequest())
    second = await fleet.admit("second", ResourceRequest())
    assert fleet.generators.held == {"generator-0": "first"}
    with pytest.raises(Unavailable, match=refused):
        await second.generators.wait_for(1, 0.1, "a generator")
    status = fleet.describe(fleet.registrations["generator-1"])
    assert status is not None and status.state == "ejected" and re.match(refused, status.why)


async def test_a_gang_of_another_protocol_is_leased_to_no_run_and_named_to_who_finds_no_other(
    fleet: Fleet,
) -> None:
    await register(fleet, "generator-0", "generator-1")
    await register_another_build(fleet, "trainer-0")
    run = await fleet.admit("first", ResourceRequest())
    refused = re.escape(f"trainer-0 speaks protocol {FOREIGN}, this build speaks {PROTOCOL_VERSION}")
    with pytest.raises(Unavailable, match=rf"for a trainer: refused: {refused}"):
        await run.gang(POLICY, 0.1)
    with pytest.raises(FailedPrecondition, match=refused):
        fleet.require_place(ResourceRequest())


async def test_a_run_has_the_gang_of_the_very_teacher_that_it_asks_for(fleet: Fleet) -> None:
    names = ("trainer-0", "trainer-1", "generator-0", "generator-1")
    await register(fleet, *names, "teacher", "teacher-math", "teacher-code-0", "teacher-code-1")
    both = ResourceRequest(roles=(POLICY, "teacher-math", "teacher-code"))
    first = await fleet.admit("first", both)
    assert [(await first.gang(role, 5.0)).name for role in both.roles[1:]] in (
        ["teacher-math", "teacher-code-0"],
        ["teacher-math", "teacher-code-1"],
    )
    with pytest.raises(
        FailedPrecondition, match=r"run first is using the teacher-math.*`teachers\.math\.replicas`"
    ):
        fleet.require_place(both)
    other = ResourceRequest(roles=(POLICY, "teacher", "teacher-code"))
    fleet.require_place(other)
    second = await fleet.admit("second", other)
    assert (await second.gang("teacher", 5.0)).name == "teacher"
    held = {(await run.gang("teacher-code", 5.0)).name for run in (first, second)}
    assert held == {"teacher-code-0", "teacher-code-1"}
    lost = await first.gang("teacher-math", 5.0)
    await first.gang_lost("teacher-math", lost.instance_id, "it is gone")
    with pytest.raises(Unavailable, match="for a teacher-math"):
        await first.gang("teacher-math", 0.1)


async def test_a_run_that_lost_its_gang_goes_on_with_one_that_is_free(fleet: Fleet) -> None:
    await register(fleet, "trainer-0", "trainer-1")
    run = await fleet.admit("run", ResourceRequest())
    lost = await run.gang(POLICY, 5.0)
    await run.gang_lost(POLICY, lost.instance_id, "it is gone")
    assert (await run.gang(POLICY, 5.0)).name != lost.name


async def test_of_two_runs_that_wait_for_a_gang_each_gets_one(fleet: Fleet) -> None:
    runs = [await fleet.admit(name, ResourceRequest()) for name in ("first", "second")]
    waiting = [asyncio.create_task(run.gang(POLICY, 60.0)) for run in runs]
    await asyncio.sleep(0)
    await register(fleet, "trainer-0")
    done, left = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == len(left) == 1
    await register(fleet, "trainer-0", "trainer-1")
    assert sorted([(await task).name for task in waiting]) == ["trainer-0", "trainer-1"]


async def test_after_a_restart_each_run_has_the_services_that_it_had(new_fleet: Callable[[], Fleet]) -> None:
    names = ("trainer-0", "trainer-1", "generator-0", "generator-1", "generator-2")
    before = new_fleet()
    await register(before, *names)
    runs = [await before.admit(name, ResourceRequest()) for name in ("first", "second")]
    gangs = [(await run.gang(POLICY, 5.0)).name for run in runs]
    held = dict(before.generators.held)

    after = new_fleet()
    await register(after, *names)
    second, first = await after.admit_again([(name, ResourceRequest()) for name in ("second", "first")])
    assert after.generators.held == held
    await register(after, *(name for name in names if name != gangs[1]))
    with pytest.raises(
        Unavailable, match=r"waited 0\.1 s for a trainer"
    ):  # the one that is free holds the other run's session
        await second.gang(POLICY, 0.1)
    await register(after, *names)
    assert [(await run.gang(POLICY, 5.0)).name for run in (first, second)] == gangs
    assert after.generators.held == held


async def test_a_replica_is_drained_by_name_or_instance_and_the_others_work_on(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "generator-1", "reward-0", "reward-1")
    run = await fleet.admit("run", ResourceRequest())
    drained = [
        await fleet.drain("generator-1"),
        await fleet.drain("reward-0"),
        await fleet.drain("generator-1"),
    ]
    for one in drained:
        status = fleet.describe(one)
        assert status is not None and (status.state, status.why) == ("draining", "drained by a user")
    assert generators(fleet, "run") == ["generator-0"]
    assert [one.name for one in run.rewards.replicas()] == ["reward-1"]
    await register(fleet, "generator-0", "generator-1/b", "reward-0/b", "reward-1")
    assert len(generators(fleet, "run")) == len(run.rewards.replicas()) == 2


async def test_the_last_generator_of_a_run_stays_in_service(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "generator-1")
    first = await fleet.admit("first", ResourceRequest())
    await fleet.admit("second", ResourceRequest())
    for name in ("generator-0", "generator-1"):
        with pytest.raises(FailedPrecondition, match="the only generator"):
            await fleet.drain(name)
    await first.close()
    await fleet.drain("generator-0")
    assert generators(fleet, "second") == ["generator-1"]


async def test_the_last_reward_stays_in_service(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "reward-0", "reward-1")
    await fleet.admit("run", ResourceRequest())
    await fleet.drain("reward-0")
    with pytest.raises(FailedPrecondition, match="the only reward of run run"):
        await fleet.drain("reward-1")


async def test_a_name_means_the_replica_that_lives_in_its_slot(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "generator-1")
    run = await fleet.admit("run", ResourceRequest())
    dead = fleet.registrations["generator-1"]
    dead.started_at.FromSeconds(100)
    successor = reg.Registration()
    successor.CopyFrom(dead)
    successor.instance_id = "generator-1/b"
    successor.started_at.FromSeconds(200)
    # A heartbeat of one that was killed is remembered for a while.
    await fleet.see({**fleet.registrations, successor.instance_id: successor})
    assert (await fleet.drain("generator-1")).instance_id == "generator-1/b"
    assert "generator-1/b" not in [one.instance_id for one in run.generators.replicas()]


async def test_what_is_no_replica_is_not_found(fleet: Fleet) -> None:
    await register(fleet, "generator-0", "trainer-0")
    with pytest.raises(NotFound, match="'trainer-0'"):
        await fleet.drain("trainer-0")
