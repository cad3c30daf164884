"""Children and their descendants end when they should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.subprocess_group import ProcessGroup

# Starts a grandchild, tells its pid, then ignores SIGTERM.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper])
print(child.pid, flush=True)
time.sleep(600)
"""

# A parent that starts a child in a group and then lives on.
PARENT = """
import asyncio, sys
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.subprocess_group import ProcessGroup

async def main():
    group = await ProcessGroup.start([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                                     stdout=asyncio.subprocess.PIPE)
    await group.process.stdout.readline()
    print(group.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def first_number(group: ProcessGroup) -> int:
    assert group.process.stdout is not None
    return int(await asyncio.wait_for(group.process.stdout.readline(), 20))


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)
    return ProcessIdentity.of(pid) is None


async def test_stop_ends_descendants_that_ignore_it() -> None:
    group = await ProcessGroup.start([sys.executable, "-c", STUBBORN], stdout=asyncio.subprocess.PIPE)
    grandchild = await first_number(group)
    assert await group.stop(0.1) == -signal.SIGKILL
    assert gone(grandchild)
    group.signal(signal.SIGTERM)


async def test_the_child_dies_with_a_killed_parent() -> None:
    parent = await ProcessGroup.start([sys.executable, "-c", PARENT], stdout=asyncio.subprocess.PIPE)
    child = await first_number(parent)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    assert gone(child)


async def test_command_gets_its_folder_environment_and_exit_code(tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(7 if os.getcwd() == os.environ['WANTED'] else 1)"
    environment = {**os.environ, "WANTED": str(tmp_path)}
    group = await ProcessGroup.start(
        [sys.executable, "-c", code], environment=environment, directory=tmp_path
    )
    assert await asyncio.wait_for(group.wait(), 20) == 7


async def test_a_child_that_has_just_died_is_told_by_its_own_end_whatever_is_sent_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This watcher takes the status in a turn of the loop, so that the death lies between two of them.
    watcher = asyncio.PidfdChildWatcher()
    watcher.attach_loop(asyncio.get_running_loop())
    monkeypatch.setattr(asyncio.get_event_loop_policy(), "_watcher", watcher)
    group = await ProcessGroup.start([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(group.pid, signal.SIGSEGV)
    os.waitid(os.P_PID, group.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop must not see it yet.
    group.signal_leader(signal.SIGCONT)
    assert await asyncio.wait_for(group.wait(), 20) == -signal.SIGSEGV
