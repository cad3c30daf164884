"""A service that says READY is admitted once it has answered at the address that it advertises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1 import operate_pb2, operate_pb2_grpc
from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core import rpc
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.rpc import dial_back
from flotilla_core.rpc.dial_back import DialBack
from flotilla_testing.credentials import ours, stranger
from flotilla_testing.servers import serving


class Answering(operate_pb2_grpc.OperateServiceServicer):
    def __init__(self, instance: str) -> None:
        self.own = reg.Registration(kind=reg.SERVICE_KIND_REWARD, name="reward-0", instance_id=instance)
        self.calls = 0

    async def Describe(self, request: Any, context: Any) -> operate_pb2.DescribeResponse:
        self.calls += 1
        return operate_pb2.DescribeResponse(registration=self.own)


class Watched:
    """A registry whose snapshots the test makes."""

    def __init__(self) -> None:
        self._snapshots: asyncio.Queue[dict[str, reg.Registration]] = asyncio.Queue()

    def show(self, *registrations: reg.Registration) -> None:
        self._snapshots.put_nowait({one.instance_id: one for one in registrations})

    async def watch(self) -> AsyncIterator[dict[str, reg.Registration]]:
        while True:
            yield await self._snapshots.get()


def registration(address: str, host: str = "") -> reg.Registration:
    return reg.Registration(
        kind=reg.SERVICE_KIND_REWARD,
        name="reward-0",
        instance_id="reward-0-a",
        address=address,
        state=reg.INSTANCE_STATE_READY,
        host=host or dial_back.socket.gethostname(),
        protocol_version=PROTOCOL_VERSION,
    )


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, Answering]]:
    answering = Answering("reward-0-a")
    async with serving(answering) as address:
        yield address, answering


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "AGAIN_S", 0.02)
    monkeypatch.setattr(dial_back, "DIAL_S", 1.0)


async def shown(one: reg.Registration, *, until_ready: bool = False) -> tuple[int, str]:
    """Return the state of the registration, and why it is not ready, as soon as there is an answer."""
    watched = Watched()
    watched.show(one)
    dialling = DialBack(lambda address: rpc.connect(address, credential=ours()))
    async with asyncio.timeout(20), aclosing(dialling.follow(watched.watch())) as views:
        async for snapshot, why in views:
            state = snapshot[one.instance_id].state
            reason = why.get(one.instance_id, "")
            if state == reg.INSTANCE_STATE_READY or (reason and not until_ready):
                return state, reason
    raise AssertionError("the views ended")


async def test_one_that_answers_is_ready_and_is_dialled_once(served: tuple[str, Answering]) -> None:
    address, answering = served
    assert await shown(registration(address)) == (reg.INSTANCE_STATE_READY, "")
    assert answering.calls == 1


async def test_a_coordinator_gets_no_work_and_so_is_never_dialled() -> None:
    before = registration("127.0.0.1:1")
    before.kind = reg.SERVICE_KIND_COORDINATOR
    assert await shown(before) == (reg.INSTANCE_STATE_READY, "")


async def test_an_address_without_an_answer_is_named() -> None:
    state, why = await shown(registration("127.0.0.1:1"))
    assert state == reg.INSTANCE_STATE_STARTING
    assert "127.0.0.1:1 does not answer" in why and "bind.advertise_host" in why


async def test_another_instance_at_the_address_is_named(served: tuple[str, Answering]) -> None:
    address, answering = served
    answering.own.instance_id = "reward-9-z"
    state, why = await shown(registration(address))
    assert state == reg.INSTANCE_STATE_STARTING and "reward-9-z" in why


@pytest.mark.parametrize(
    "claim",
    [{"kind": reg.SERVICE_KIND_TRAINER}, {"name": "reward-1"}, {"role": "policy"}],
    ids=lambda claim: next(iter(claim)),
)
async def test_a_registration_that_lies_about_its_instance_is_not_admitted(
    served: tuple[str, Answering], claim: dict[str, Any]
) -> None:
    one = registration(served[0])
    one.MergeFrom(reg.Registration(**claim))
    state, why = await shown(one)
    assert state == reg.INSTANCE_STATE_STARTING and "reward-0-a, the reward reward-0:" in why


async def test_a_stranger_at_the_address_is_named(tmp_path: Path) -> None:
    async with serving(credential=stranger(tmp_path)) as address:
        state, why = await shown(registration(address))
    assert state == reg.INSTANCE_STATE_STARTING and "is foreign" in why


async def test_the_loopback_of_another_host_is_refused_without_a_call(served: tuple[str, Answering]) -> None:
    address, answering = served
    state, why = await shown(registration(address, host="elsewhere"))
    assert state == reg.INSTANCE_STATE_STARTING and "loopback" in why and "elsewhere" in why
    assert answering.calls == 0


async def test_one_that_answers_later_is_admitted_later(served: tuple[str, Answering]) -> None:
    address, answering = served
    answering.own.instance_id = "reward-9-z"
    waiting = asyncio.create_task(shown(registration(address), until_ready=True))
    async with asyncio.timeout(20):
        while answering.calls < 2:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    answering.own.instance_id = "reward-0-a"
    assert await waiting == (reg.INSTANCE_STATE_READY, "")


async def test_one_that_left_and_came_back_is_not_shown_as_starting(served: tuple[str, Answering]) -> None:
    address, answering = served
    one, watched = registration(address), Watched()
    watched.show(one)
    dialling = DialBack(lambda address: rpc.connect(address, credential=ours()))
    states: list[int | None] = []
    async with asyncio.timeout(20), aclosing(dialling.follow(watched.watch())) as views:
        async for snapshot, _ in views:
            shown_state = snapshot[one.instance_id].state if snapshot else None
            states.append(shown_state)
            if shown_state is None:
                watched.show(one)
            elif shown_state == reg.INSTANCE_STATE_READY:
                if None in states:
                    break
                watched.show()
    left = states.index(None)
    assert set(states[left + 1 :]) == {reg.INSTANCE_STATE_READY}
    assert answering.calls == 1


async def test_what_left_longest_ago_is_forgotten_and_dialled_again(
    served: tuple[str, Answering], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_back, "MOST_REACHED", 2)
    address, answering = served
    watched = Watched()
    dialling = DialBack(lambda address: rpc.connect(address, credential=ours()))
    async with asyncio.timeout(20), aclosing(dialling.follow(watched.watch())) as views:
        for name in ("a", "b", "c", "c", "b", "a"):
            one = registration(address)
            one.instance_id = answering.own.instance_id = f"reward-0-{name}"
            watched.show(one)
            async for snapshot, _ in views:
                if (
                    one.instance_id in snapshot
                    and snapshot[one.instance_id].state == reg.INSTANCE_STATE_READY
                ):
                    break
    assert len(dialling._reached) == 2
    assert answering.calls == 4, "each once, and again the one that was forgotten"


async def test_a_watch_that_fails_fails_who_follows() -> None:
    async def watch() -> AsyncIterator[dict[str, reg.Registration]]:
        yield {}
        raise ConnectionError("the registry is gone")

    with pytest.raises(ConnectionError):
        async for _ in DialBack(rpc.connect).follow(watch()):
            pass
