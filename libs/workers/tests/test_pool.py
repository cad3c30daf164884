"""Workers of a service that is none of ours: what they are asked and say is its own affair."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import IsolationConfig
from flotilla_core.errors import Unavailable
from flotilla_core.subprocess_group import AdoptedProcess
from flotilla_testing.reward_process import exists
from flotilla_workers.frames import NoAnswer
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import NO_JAIL, find
from flotilla_workers.pool import WorkerPool, _Asked, _Queue

LOADER = "flotilla_workers.functions:user_function"
FUNCTIONS = """
import os, pathlib, time

def backwards(question):
    return {"of": question, "is": question["text"][::-1], "by": os.getpid()}

def endless(question):
    pathlib.Path(__file__).with_name("begun").touch()
    while True:
        time.sleep(1)

def dies(question):
    os.kill(os.getpid(), question["by"])
"""


def read(target: Target, said: Any) -> Any:
    if said["is"] == "nonsense":
        raise NoAnswer("it is nonsense")
    return said


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool[Any]]:
    pool: WorkerPool[Any] = WorkerPool(2, LOADER, read)
    await pool.start()
    yield pool
    await pool.stop()


@pytest.fixture
def target(tmp_path: Path) -> Callable[[str], Target]:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return lambda function: Target("file", str(file), function)


async def test_a_worker_that_says_what_its_service_cannot_read_is_killed(
    pool: WorkerPool[Any], target: Callable[[str], Target]
) -> None:
    question = {"text": "käfer\ud800", "more": [None, {"deep": 1.5}]}
    backwards = target("backwards")
    good, _ = await pool.ask(backwards, question, 20)
    assert good["of"] == question and good["is"] == question["text"][::-1]
    bad, _ = await pool.ask(backwards, {"text": "esnesnon"}, 20)
    assert (
        "the worker was killed while it answered" in bad.message and "because it is nonsense" in bad.message
    )
    assert not Path(f"/proc/{good['by']}").exists()
    assert (await pool.ask(backwards, question, 20))[0]["by"] != good["by"]


async def test_workers_and_what_runs_in_them_end_with_the_pool(
    pool: WorkerPool[Any], target: Callable[[str], Target], tmp_path: Path
) -> None:
    job = asyncio.create_task(pool.ask(target("endless"), {}, 600))
    await exists(tmp_path / "begun")
    pids = list(pool.pids.values())
    assert len(pids) == 2
    await pool.stop()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    outcome, _ = await asyncio.wait_for(job, 20)
    assert outcome.message == "the worker was ended by SIGKILL while it answered"


@pytest.mark.parametrize(("places", "told"), [(1, [True, False]), (0, [True, True])])
async def test_a_place_that_fails_costs_one_question_where_another_one_serves(
    places: int, told: list[bool]
) -> None:
    queue: _Queue[Any] = _Queue(Target("builtin", "any"))
    queue.places = places
    queue.waiting.extend(_Asked(None, asyncio.get_running_loop().create_future()) for _ in told)
    waiting = [*queue.waiting]
    serving = asyncio.create_task(_fails())
    await asyncio.wait([serving])
    queue.fail_with(serving)
    assert [one.outcome.done() and bool(one.outcome.exception()) for one in waiting] == told


async def _fails() -> None:
    raise Unavailable("a worker did not start", why="of the test", next_step="None.")


@pytest.mark.parametrize("preload", [None, ()], ids=["worker", "process of an answer"])
async def test_a_death_by_a_signal_without_a_name_is_an_answer_like_other_deaths(
    target: Callable[[str], Target], tmp_path: Path, preload: tuple[str, ...] | None
) -> None:
    jail = find(IsolationConfig(readable=(tmp_path,), preload=preload))
    if preload is not None and not jail.level:
        pytest.skip(f"this host has no jail: {jail.why_not_higher}")
    pool: WorkerPool[Any] = WorkerPool(1, LOADER, read, lambda: NO_JAIL if preload is None else jail)
    await pool.start()
    try:
        for number, name in (
            (signal.SIGRTMIN + 6, f"signal {signal.SIGRTMIN + 6}"),
            (signal.SIGSEGV, "SIGSEGV"),
        ):
            outcome, _ = await pool.ask(target("dies"), {"by": int(number)}, 20)
            assert f"was ended by {name} " in outcome.message
    finally:
        await pool.stop()


async def test_workers_end_with_a_service_that_is_killed() -> None:
    script = (
        "import asyncio\n"
        "from flotilla_workers.pool import WorkerPool, _Asked, _Queue\n"
        "async def main():\n"
        f"    pool = WorkerPool(1, {LOADER!r}, print)\n"
        "    await pool.start()\n"
        "    print(*pool.pids.values(), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert service.stdout is not None
    worker = AdoptedProcess(int(await service.stdout.readline()))
    service.kill()
    await service.wait()
    await asyncio.wait_for(worker.wait(), 10)
