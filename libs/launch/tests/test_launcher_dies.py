"""What becomes of a stack whose launcher is killed. `tests/chaos/test_launcher_dies.py` kills more of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla.launcher.v1.launcher_pb2 import PROCESS_STATE_READY
from flotilla_core.errors import FailedPrecondition
from flotilla_core.trust import Credential
from flotilla_core.trust.authority import rotate
from flotilla_launch import local
from flotilla_launch.client import LauncherClient
from flotilla_launch.process_tree import MARK
from flotilla_launch.records import ProcessRecord
from flotilla_launch.stack_lock import is_held
from flotilla_launch.state import find
from flotilla_testing.tiny_stacks import until


async def test_a_killed_launcher_comes_back_and_looks_after_what_lives(stacks) -> None:
    stacks.behave(generator_0="parent")
    config = stacks.config()
    first = await stacks.up(config)
    before, processes = stacks.identities(), stacks.processes()
    os.kill(first.launcher.pid, signal.SIGKILL)
    file = await stacks.next_launcher(first.launcher.pid)
    assert stacks.identities() == before, "nothing was started again"
    assert len(stacks.processes()) == len(processes)
    assert not (await stacks.up(config)).changed
    async with LauncherClient.open(file) as launcher:
        listed = {status.name: status for status in (await launcher.state()).processes}
        assert {status.state for status in listed.values()} == {PROCESS_STATE_READY}
        assert {status.name: status.address for status in first.processes} == {
            name: status.address for name, status in listed.items()
        }
        for name in ("generator-0", "nats"):
            os.kill(before[name].pid, signal.SIGKILL)
            again = await until(launcher, name, lambda s: s.restarts == 1 and s.state == PROCESS_STATE_READY)
            assert again.address == listed[name].address or name != "nats"
        grown = await launcher.scale(SERVICE_KIND_GENERATOR, 2, timeout_s=30)
        assert {status.state for status in grown} == {PROCESS_STATE_READY}
        await launcher.scale(SERVICE_KIND_GENERATOR, 1, timeout_s=30)
        assert stacks.identities()["trainer"] == before["trainer"]
    assert await local.down(stacks.paths())
    assert stacks.processes() == set()
    assert stacks.segments() == set()


async def test_an_authority_that_is_replaced_while_no_launcher_is_there_ends_for_nats_too(stacks) -> None:
    paths = stacks.paths()
    first = await stacks.up(stacks.config())
    os.kill(first.launcher.pid, signal.SIGKILL)
    trusted = Credential(rotate(paths.directory, 0)).read().authorities.decode()
    assert (paths.nats / "authorities.pem").read_text() != trusted
    await stacks.next_launcher(first.launcher.pid)
    await stacks.wait_for("the new one", lambda: (paths.nats / "authorities.pem").read_text() == trusted)
    await stacks.wait_for("NATS to read it", lambda: "Reloaded: tls" in paths.nats_log.read_text())


async def test_a_launcher_killed_before_the_stack_was_up_leaves_nothing(stacks) -> None:
    stacks.behave(trainer="hang")
    up = asyncio.create_task(stacks.up(stacks.config()))
    paths = stacks.paths()
    await stacks.wait_for(
        "a service", lambda: paths.processes_file.exists() and stacks.identities().get("trainer")
    )
    await stacks.wait_for("a guardian", lambda: is_held(paths.guardian_lock_file))
    os.kill(find(paths).pid, signal.SIGKILL)
    with pytest.raises(FailedPrecondition, match="died while it started the stack"):
        await up
    await stacks.wait_for("every process to end", lambda: stacks.processes() == set(), 25.0)
    assert not paths.processes_file.exists()


def test_a_guardian_waits_without_the_models_of_the_configuration() -> None:
    code = "import sys, flotilla_launch.guardian; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


async def test_one_that_was_being_started_is_found_by_its_mark_and_replaced(stacks) -> None:
    mark = "reward-0#half"
    sleeper = await asyncio.create_subprocess_exec("sleep", "60", env={**os.environ, MARK: mark})
    service = stacks.service([sys.executable, "-c", "raise SystemExit(3)"])
    status = {"name": "reward-0", "state": "PROCESS_STATE_STARTING"}
    service.take_over(ProcessRecord("reward-0", None, mark, status=status))
    async with asyncio.timeout(15):
        assert await sleeper.wait() == -signal.SIGKILL
    await service.stop()
    assert service.record().identity is None
