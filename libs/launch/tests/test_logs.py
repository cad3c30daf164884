"""A service that prints without end costs neither the launcher nor the disk more than is known beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

from flotilla.launcher.v1.launcher_pb2 import PROCESS_STATE_FAILED
from flotilla_core.log_files import KEPT_BYTES, MOST_BYTES, former
from flotilla_launch.client import LauncherClient
from flotilla_launch.compose.file import _TO_LOG
from flotilla_launch.logs import failure_excerpt, read_logs
from flotilla_testing.peak_memory import forget_most_memory, most_memory_kib
from flotilla_testing.tiny_stacks import until

MIB = 1 << 20
LAUNCHER_MAY_GROW_KIB = 64 * 1024


async def test_a_flood_without_newlines_leaves_launcher_and_disk_as_they_were(stacks) -> None:
    stacks.behave(generator_0="flood")
    result = await stacks.up(stacks.config(restart_budget=0))
    before = most_memory_kib(result.launcher.pid)
    log = stacks.paths().log_file("generator-0")
    os.kill(stacks.identities()["generator-0"].pid, signal.SIGUSR1)
    async with LauncherClient.open(result.launcher) as launcher:
        status = await until(launcher, "generator-0", lambda one: one.state == PROCESS_STATE_FAILED)
        assert "was killed by SIGKILL" in status.error and len(status.error) < 4000
        await stacks.wait_for("the log to be cut", lambda: log.stat().st_size <= MOST_BYTES)
        assert former(log).stat().st_size <= MOST_BYTES + MIB
        assert len((await launcher.state()).processes) == 4
    assert most_memory_kib(result.launcher.pid) - before < LAUNCHER_MAY_GROW_KIB


async def test_a_log_is_cut_by_the_next_launcher_where_the_first_was_killed(stacks) -> None:
    result = await stacks.up(stacks.config())
    os.kill(result.launcher.pid, signal.SIGKILL)
    log = stacks.paths().log_file("trainer")
    with log.open("ab") as file:
        for _ in range(MOST_BYTES // MIB + 1):
            file.write(b"a line\n" * (MIB // 7))
    before = stacks.identities()
    await stacks.next_launcher(result.launcher.pid)
    await stacks.wait_for("the log to be cut", lambda: former(log).exists() and log.stat().st_size < MIB)
    assert stacks.identities()["trainer"] == before["trainer"], "its process notices nothing"


async def test_lines_of_several_logs_are_read_within_a_limit_of_memory(tmp_path: Path) -> None:
    log = tmp_path / "reward-0.log"
    with log.open("wb") as file:
        for _ in range(200):
            file.write(b"x" * MIB)
    forget_most_memory()
    before = most_memory_kib()
    why, last = failure_excerpt(log)
    assert not why and len("".join(last)) < 2000
    assert len([line async for line in read_logs({"a": log, "b": log}, 100, follow=False)]) == 2
    assert most_memory_kib() - before < 150 * 1024


async def test_the_line_that_says_why_is_found_and_cut(tmp_path: Path) -> None:
    log = tmp_path / "generator-0.log"
    log.write_text(json.dumps({"level": "error", "event": "no memory", "error": "x" * 50_000}) + "\nbye\n")
    why, last = failure_excerpt(log)
    assert why.startswith("no memory: xxx") and why.endswith("characters more)") and len(why) < 1100
    assert last[0].startswith("error: no memory  error=xxx") and last[-1] == "bye"


async def test_a_container_cuts_its_own_logs(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "reward-0.log"
    log.parent.mkdir()
    flood = f"yes | head -c {MOST_BYTES + MIB}; while ! [ -e '{log}.1' ]; do sleep 0.1; done; echo done"
    process = await asyncio.create_subprocess_exec(
        *_TO_LOG, str(log), "sh", "-c", flood, start_new_session=True
    )
    try:
        async with asyncio.timeout(30):
            assert await process.wait() == 0
            while log.stat().st_size > MIB:
                await asyncio.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert former(log).stat().st_size == KEPT_BYTES
