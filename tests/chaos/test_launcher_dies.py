"""What becomes of a stack whose launcher, or guardian, or both, are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla.launcher.v1.launcher_pb2 import (
    PROCESS_STATE_READY,
    PROCESS_STATE_STARTING,
)
from flotilla_core.errors import FlotillaError, Unavailable
from flotilla_launch import local
from flotilla_launch.client import LauncherClient, require
from flotilla_launch.records import Phase, StackRecord
from flotilla_launch.stack_lock import is_held
from flotilla_launch.state import find
from flotilla_testing.tiny_stacks import status_of, until

SHORT_LEASE = "from flotilla_launch import lease\nlease.LEASE_S = 3.0\n"
MAIN = "from flotilla_launch.main import main\nmain()\n"


async def test_a_killed_guardian_comes_back_and_guards(stacks) -> None:
    first = await stacks.up(stacks.config())
    await stacks.wait_for("a guardian", lambda: is_held(stacks.paths().guardian_lock_file))
    old, before = stacks.guardian(), stacks.identities()
    os.kill(old.pid, signal.SIGKILL)
    await stacks.wait_for(
        "another guardian", lambda: stacks.guardian() not in (None, old) and stacks.guardian().alive(), 10.0
    )
    os.kill(first.launcher.pid, signal.SIGKILL)
    await stacks.next_launcher(first.launcher.pid)
    assert stacks.identities() == before


async def test_what_died_and_what_was_stopped_while_no_launcher_was_there(stacks) -> None:
    first = await stacks.up(stacks.config())
    async with LauncherClient.open(first.launcher) as launcher:
        await launcher.scale(SERVICE_KIND_GENERATOR, 2, timeout_s=30)
        await launcher.stop("generator-1")
    before = stacks.identities()
    guardian = stacks.guardian()
    os.kill(guardian.pid, signal.SIGSTOP)
    os.kill(first.launcher.pid, signal.SIGKILL)
    for name in ("trainer", "nats"):
        os.kill(before[name].pid, signal.SIGKILL)
    up = asyncio.create_task(local.up(stacks.config(), executables=stacks.executables))
    await asyncio.sleep(0)
    os.kill(guardian.pid, signal.SIGCONT)
    result = await up
    assert result.changed, "it started the one that was stopped"
    async with LauncherClient.open(find(stacks.paths())) as launcher:
        for name, restarts in (("trainer", 1), ("nats", 1), ("generator-0", 0), ("coordinator", 0)):
            # One that dies while it is adopted is READY for another moment.
            await until(
                launcher, name, lambda s, n=restarts: s.state == PROCESS_STATE_READY and s.restarts == n
            )
            assert (stacks.identities()[name] == before[name]) == (restarts == 0)
        assert (await status_of(launcher, "generator-1")).state == PROCESS_STATE_READY


async def test_without_launcher_and_guardian_everything_ends_by_itself(stacks) -> None:
    stacks.launcher_runs(SHORT_LEASE + MAIN)
    stacks.behave(generator_0="parent")
    first = await stacks.up(stacks.config())
    await stacks.wait_for("a guardian", lambda: is_held(stacks.paths().guardian_lock_file))
    assert len(stacks.segments()) == 1
    os.kill(stacks.guardian().pid, signal.SIGKILL)
    os.kill(first.launcher.pid, signal.SIGKILL)
    await stacks.wait_for("every process to end", lambda: stacks.processes() == set(), 25.0)
    assert stacks.segments() == set()
    assert not Path(first.launcher.socket).exists()
    paths = stacks.paths()
    assert not paths.launcher_file.exists() and not paths.processes_file.exists()
    stacks.behave()
    second = await stacks.up(stacks.config())
    assert second.changed
    assert {status.state for status in second.processes} == {PROCESS_STATE_READY}


async def test_down_and_up_need_no_launcher_and_no_guardian(stacks) -> None:
    stacks.behave(generator_0="parent")
    for command in ("down", "up"):
        first = await stacks.up(stacks.config())
        await stacks.wait_for("a guardian", lambda: is_held(stacks.paths().guardian_lock_file))
        os.kill(stacks.guardian().pid, signal.SIGKILL)
        os.kill(first.launcher.pid, signal.SIGKILL)
        before = stacks.identities()
        assert before["generator-0"].alive()
        if command == "down":
            assert await local.down(stacks.paths())
            assert stacks.processes() == set()
        else:
            assert (await stacks.up(stacks.config())).changed
            assert not any(identity.alive() for identity in before.values())


async def test_a_launcher_killed_while_it_scales_is_followed_by_one_that_goes_on(stacks) -> None:
    stacks.behave(generator_1="hang")
    first = await stacks.up(stacks.config())
    async with LauncherClient.open(first.launcher) as launcher:
        scale = asyncio.create_task(launcher.scale(SERVICE_KIND_GENERATOR, 2, timeout_s=60))
        await stacks.wait_for("its start", stacks.paths().announce_file("generator-1").exists)
    before = stacks.identities()
    os.kill(first.launcher.pid, signal.SIGKILL)
    with pytest.raises(FlotillaError):
        await scale
    async with LauncherClient.open(await stacks.next_launcher(first.launcher.pid)) as launcher:
        assert (await status_of(launcher, "generator-1")).state == PROCESS_STATE_STARTING
        assert stacks.identities() == before, "what had begun goes on"
        await launcher.scale(SERVICE_KIND_GENERATOR, 1, timeout_s=30)
        assert not before["generator-1"].alive()
        assert "generator-1" not in stacks.identities()


async def test_down_ends_everything_also_when_the_launcher_is_killed_meanwhile(stacks) -> None:
    stacks.behave(trainer="stubborn")
    first = await stacks.up(stacks.config())
    paths = stacks.paths()
    down = asyncio.create_task(local.down(paths))
    await stacks.wait_for(
        "the stop to begin", lambda: StackRecord.read(paths.processes_file).phase is Phase.STOPPING
    )
    os.kill(first.launcher.pid, signal.SIGKILL)
    os.kill(stacks.identities()["trainer"].pid, signal.SIGKILL)
    assert await down
    assert stacks.processes() == set()
    assert not paths.processes_file.exists()


async def test_a_launcher_that_dies_again_and_again_is_given_up(stacks) -> None:
    first = await stacks.up(stacks.config())
    stacks.launcher_runs("raise SystemExit('no such module')\n")
    os.kill(first.launcher.pid, signal.SIGKILL)
    await stacks.wait_for("every process to end", lambda: stacks.processes() == set(), 30.0)
    with pytest.raises(Unavailable, match=r"not running.*the launcher died 6 times within 60 s"):
        require(stacks.paths())
    assert "the guardian ended the stack" in stacks.paths().log_file("launcher").read_text()
    stacks.launcher_runs(MAIN)
    await stacks.up(stacks.config())
    assert not stacks.paths().ended_file.exists()
