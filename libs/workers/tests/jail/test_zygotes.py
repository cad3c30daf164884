"""Workers that a zygote forks: each is new, sees the files of now, and ends with whatever it hangs on."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_core.config import IsolationConfig
from flotilla_core.errors import Unavailable
from flotilla_core.subprocess_group import AdoptedProcess
from flotilla_workers import process
from flotilla_workers.functions import Target
from flotilla_workers.jail import groups
from flotilla_workers.jail.jail import Jail, find
from flotilla_workers.jail.level import Level
from flotilla_workers.process import WorkerProcess
from flotilla_workers.zygotes import RESERVE, ForkedKeeper, Zygotes, _readable, fork_here

LIMIT_S = 20.0
LOADER = "flotilla_workers.functions:user_function"
FUNCTIONS = """
import os, pathlib, sys

def found(question):
    was = hasattr(sys, "left")
    sys.left = True
    return [was, os.getpid(), len([*filter(str.isdigit, os.listdir("/proc"))])]

def text(question):
    try:
        return pathlib.Path(__file__).with_name(question).read_text()
    except OSError as error:
        return type(error).__name__
"""


@pytest.fixture(scope="module")
def jail() -> Jail:
    found = find(IsolationConfig())
    if found.level is not Level.NAMESPACES or not asyncio.run(fork_here(found)):
        pytest.skip("this host forks no workers into jails")
    return replace(found, forks=True)


@pytest.fixture
async def zygotes() -> AsyncIterator[Zygotes]:
    zygotes = Zygotes()
    yield zygotes
    await zygotes.stop()
    assert not [
        one
        for made in groups._parents()
        for folder in made.values()
        for one in folder.glob(f"*-{os.getpid()}-*")
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


async def started(zygotes: Zygotes, jail: Jail, file: Path) -> WorkerProcess:
    return await zygotes.worker(jail, LOADER, [file.parent], itertools.count(64 * os.getpid()))


async def answer(worker: WorkerProcess, file: Path, function: str, question: object) -> object:
    target = Target("file", str(file), function)
    assert await worker.load(target) is None
    return await worker.ask(target, question, LIMIT_S, lambda said: said)


async def test_each_worker_is_new_and_alone_also_one_that_waited(
    zygotes: Zygotes, jail: Jail, file: Path
) -> None:
    for _ in range(RESERVE + 2):
        worker = await started(zygotes, jail, file)
        assert await answer(worker, file, "found", "") == [False, 2, 2]
        await worker.kill()


async def test_what_a_folder_hides_from_now_on_no_further_worker_reads(
    zygotes: Zygotes, jail: Jail, file: Path
) -> None:
    for kept in ("first", "another"):
        worker = await started(zygotes, jail, file)
        assert await answer(worker, file, "text", ".env") == (
            "FileNotFoundError" if kept == "first" else "PermissionError"
        )
        await worker.kill()
        file.with_name("new").write_text(kept)
        os.replace(file.with_name("new"), file.with_name(".env"))
    worker = await started(zygotes, jail, file)
    assert await answer(worker, file, "text", ".env") == "PermissionError"
    await worker.kill()


async def test_workers_end_with_a_zygote_that_is_killed_and_another_one_takes_its_place(
    zygotes: Zygotes, jail: Jail, file: Path
) -> None:
    worker = await started(zygotes, jail, file)
    (zygote,) = zygotes._kept.values()
    bubblewrap = zygote.process.pid
    os.kill(int(Path(f"/proc/{bubblewrap}/task/{bubblewrap}/children").read_text()), signal.SIGKILL)
    zygote.process.wait()
    await worker.kill()
    assert not Path(f"/proc/{worker.pid}").exists()
    again = await started(zygotes, jail, file)
    assert await answer(again, file, "found", "") == [False, 2, 2]
    await again.kill()


async def test_a_worker_that_died_in_reserve_is_nobodys(zygotes: Zygotes, jail: Jail, file: Path) -> None:
    workers = [await started(zygotes, jail, file) for _ in range(2)]
    (zygote,) = zygotes._kept.values()
    async with asyncio.timeout(LIMIT_S):
        for waits in zygote.reserve:
            assert isinstance(waits._keeper, ForkedKeeper)
            await _readable(waits._keeper._told.fileno())
            waits._keeper.signal(signal.SIGKILL)
            await waits._keeper.wait()
    workers.append(await started(zygotes, jail, file))
    assert await answer(workers[-1], file, "found", "") == [False, 2, 2]
    for worker in workers:
        await worker.kill()


async def test_all_who_ask_at_once_after_a_zygote_died_share_the_next_one(
    zygotes: Zygotes, jail: Jail, file: Path
) -> None:
    first = [await started(zygotes, jail, file) for _ in range(2)]
    (former,) = zygotes._kept.values()
    former.process.kill()
    former.process.wait()
    workers = await asyncio.gather(*(started(zygotes, jail, file) for _ in range(3)))
    (zygote,) = zygotes._kept.values()
    assert zygote is not former and not former.reserve
    for worker in (*first, *workers):
        await worker.kill()


async def test_a_zygote_that_may_not_fork_for_a_while_keeps_its_jails(
    zygotes: Zygotes, jail: Jail, file: Path
) -> None:
    full = groups.make(1 << 30, 1)
    if full is None:
        pytest.skip("this host lets us make no groups")
    first = await started(zygotes, jail, file)
    (zygote,) = zygotes._kept.values()
    forks = str(_parent(first.pid))
    for entry in full.entries:
        Path(entry).write_text(forks)
    try:
        with pytest.raises(Unavailable):
            await started(zygotes, jail, file)
    finally:
        for folder in full.folders:
            (folder.parent / "cgroup.procs").write_text(forks)
        full.close()
    assert await answer(first, file, "found", "") == [False, 2, 2]
    again = await started(zygotes, jail, file)
    assert [*zygotes._kept.values()] == [zygote]
    for worker in (first, again):
        await worker.kill()


async def test_a_zygote_that_takes_no_orders_costs_one_worker_and_is_replaced(
    zygotes: Zygotes, jail: Jail, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await started(zygotes, jail, file)
    os.kill(_parent(first.pid), signal.SIGSTOP)
    with monkeypatch.context() as shorter:
        shorter.setattr(process, "START_LIMIT_S", 0.1)
        shorter.setattr(process, "EXIT_LIMIT_S", 0.1)
        shorter.setattr("flotilla_workers.zygotes.START_LIMIT_S", 0.1)
        with pytest.raises(Unavailable):
            await started(zygotes, jail, file)
    await first.kill()
    again = await started(zygotes, jail, file)
    assert await answer(again, file, "found", "") == [False, 2, 2]
    await again.kill()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_zygotes_and_workers_end_with_a_service_that_is_killed(jail: Jail, file: Path) -> None:
    script = f"""
import asyncio, itertools, pathlib
from dataclasses import replace
from flotilla_workers.jail.jail import find
from flotilla_workers.zygotes import Zygotes
async def main():
    zygotes = Zygotes()
    jail = replace(find(), forks=True)
    worker = await zygotes.worker(jail, {LOADER!r}, [pathlib.Path({str(file.parent)!r})], itertools.count())
    (zygote,) = zygotes._kept.values()
    print(worker.pid, zygote.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert service.stdout is not None
    left = [AdoptedProcess(int(pid)) for pid in (await service.stdout.readline()).split()]
    service.kill()
    await service.wait()
    async with asyncio.timeout(LIMIT_S):
        for one in left:
            await one.wait()
