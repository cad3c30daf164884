"""A task is given to one agent, of the run that it names; a session that is over is known as such."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_environment.gateway import sessions as module
from flotilla_environment.gateway.sessions import Queue, Sessions


async def taken(queue: Queue, run_id: str = "") -> Any:
    with queue.given(await queue.take(run_id), b"agent") as session:
        return session.task["name"]


async def test_a_task_is_given_to_one_agent_and_of_the_run_that_it_names() -> None:
    sessions, queue = Sessions(), Queue()
    opened = {name: sessions.open({"name": name}) for name in ("one", "two", "three")}
    runs = {"one": "a", "two": "b", "three": "a"}
    offers = {name: asyncio.create_task(queue.offer(runs[name], opened[name])) for name in opened}
    await asyncio.sleep(0)
    assert await taken(queue, "b") == "two"
    assert [await taken(queue) for _ in range(2)] == ["one", "three"]
    await asyncio.gather(*offers.values())
    waits = asyncio.create_task(taken(queue))
    await asyncio.sleep(0)
    assert not waits.done()
    later = asyncio.create_task(queue.offer("a", sessions.open({"name": "four"})))
    assert await waits == "four"
    await later


async def test_a_task_whose_agent_left_before_it_was_told_is_the_next_one_for_another() -> None:
    sessions, queue = Sessions(), Queue()
    opened = [sessions.open({"name": name}) for name in ("one", "two")]
    offers = [asyncio.create_task(queue.offer("run", one)) for one in opened]
    await asyncio.sleep(0)
    with pytest.raises(ConnectionError), queue.given(await queue.take(""), b"left"):
        raise ConnectionError
    assert not opened[0].taken_by and not any(one.done() for one in offers)
    assert [await taken(queue) for _ in range(2)] == ["one", "two"]
    assert {one.taken_by for one in opened} == {b"agent"}
    await asyncio.gather(*offers)


async def test_a_task_whose_episode_has_left_is_given_to_nobody() -> None:
    sessions, queue = Sessions(), Queue()
    leaves = asyncio.create_task(queue.offer("run", sessions.open({"name": "left"})))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait((leaves,))
    stays = asyncio.create_task(queue.offer("run", sessions.open({"name": "there"})))
    assert await taken(queue) == "there"
    await stays


async def test_a_session_that_is_over_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REMEMBERED", 2)
    sessions = Sessions()
    opened = [sessions.open({}) for _ in range(3)]
    assert sessions.find(opened[0].id) is opened[0]
    for session in opened:
        sessions.close(session, "done")
        sessions.close(session, "done")
    for session in opened[1:]:
        with pytest.raises(FailedPrecondition, match="over"):
            sessions.find(session.id)
    for unknown in (opened[0].id, "", "nothing"):
        with pytest.raises(NotFound):
            sessions.find(unknown)
    assert len(sessions) == 0


async def test_a_key_leads_to_its_tasks_until_it_is_forgotten() -> None:
    sessions, queue = Sessions(), Queue()
    sessions.admit(b"key", queue)
    assert sessions.queue_of(b"key") is queue and sessions.queue_of(b"ke") is None
    sessions.forget(b"key")
    assert sessions.queue_of(b"key") is None
