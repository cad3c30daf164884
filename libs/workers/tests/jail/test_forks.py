"""An answer in a process of its own finds nothing that the one before it left beside the content of files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_core.config import IsolationConfig
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import find
from flotilla_workers.pool import WorkerPool

FUNCTIONS = """
import fcntl, os, resource

HOME = os.environ["HOME"]
WAYS = {
    "an attribute": lambda: os.setxattr(HOME, "user.left", b"1"),
    "a time": lambda: os.utime(HOME, (123, 123)),
    "a mode": lambda: os.chmod(HOME, 0o1700),
    "the state of a descriptor": lambda: os.set_blocking(1, False),
    "the size of a pipe": lambda: fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 4096),
    "a limit of the worker": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (100, 200)),
    "the turn of the worker": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 7),
}

def leaves(question):
    try:
        WAYS[question["way"]]()
    except OSError as error:
        return str(error)
    return "left"

def finds(question):
    state = os.stat(HOME)
    times = [time == 123 for time in (state.st_atime, state.st_mtime)]
    pipe = [os.get_blocking(1), fcntl.fcntl(2, fcntl.F_GETPIPE_SZ)]
    turn = [resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0)]
    return [os.listxattr(HOME), state.st_mode, times, pipe, turn]
"""
WAYS = (
    "an attribute",
    "a time",
    "a mode",
    "the state of a descriptor",
    "the size of a pipe",
    "a limit of the worker",
    "the turn of the worker",
)


@pytest.fixture(scope="module")
def file() -> Any:
    with tempfile.TemporaryDirectory(prefix="flotilla-forks-") as name:
        os.chmod(name, 0o755)
        file = Path(name, "functions.py")
        file.write_text(FUNCTIONS)
        yield file


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool[Any]]:
    jail = find(IsolationConfig(preload=()))
    if not jail.level:
        pytest.skip(f"this host has no jail: {jail.why_not_higher}")
    pool: WorkerPool[Any] = WorkerPool(
        1, "flotilla_workers.functions:user_function", lambda _, said: said, lambda: jail
    )
    await pool.start()
    yield pool
    await pool.stop()


@pytest.mark.parametrize("way", WAYS)
async def test_the_next_answer_finds_nothing_that_was_left_by(
    pool: WorkerPool[Any], file: Path, way: str
) -> None:
    before, _ = await pool.ask(Target("file", str(file), "finds"), {}, 20)
    left, _ = await pool.ask(Target("file", str(file), "leaves"), {"way": way}, 20)
    after, _ = await pool.ask(Target("file", str(file), "finds"), {}, 20)
    assert isinstance(before, list) and isinstance(left, str)
    assert after == before, left


async def test_an_answer_that_leaves_nothing_costs_no_worker(pool: WorkerPool[Any], file: Path) -> None:
    pids = []
    for _ in range(3):
        await pool.ask(Target("file", str(file), "finds"), {}, 20)
        pids += [pid for name, pid in pool.pids.items() if "unused" not in name]
    assert len(pids) == 3 and len({*pids}) == 1
