from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flotilla.common.v1.registration_pb2 import (
    SERVICE_KIND_GENERATOR,
    SERVICE_KIND_TRAINER,
)
from flotilla.launcher.v1.launcher_pb2 import (
    PROCESS_STATE_ATTACHED,
    PROCESS_STATE_FAILED,
    PROCESS_STATE_READY,
    PROCESS_STATE_STOPPED,
)
from flotilla_core.config import FleetJudgeConfig, dump_yaml
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidConfig, InvalidRequest
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.trust import write_secret
from flotilla_launch import client, local, service_process
from flotilla_launch.child import under_lease
from flotilla_launch.client import LauncherClient
from flotilla_launch.nats_process import NatsProcess
from flotilla_launch.process_tree import tree_of
from flotilla_launch.service_process import ServiceProcess
from flotilla_launch.stack_lock import hold_lock
from flotilla_launch.state import find
from flotilla_testing.credentials import credential, role_credential
from flotilla_testing.tiny_stacks import until

SERVICES = {"nats", "coordinator", "trainer", "generator-0"}


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, int(port))) == 0


async def test_two_ups_at_once_make_one_stack_ready_and_further_ones_change_nothing(stacks) -> None:
    both = await asyncio.gather(stacks.up(stacks.config()), stacks.up(stacks.config()))
    assert sorted(result.changed for result in both) == [False, True]
    first = both[0]
    assert {status.name for status in first.processes} == SERVICES
    assert {status.state for status in first.processes} == {PROCESS_STATE_READY}
    assert all(answers(status.address) for status in first.processes)
    before = stacks.identities()

    third = await stacks.up(stacks.config())
    assert not third.changed
    assert stacks.identities() == before
    assert third.launcher == first.launcher

    with pytest.raises(FailedPrecondition) as caught:
        await stacks.up(stacks.config(trainer={"nproc": 2}))
    assert "trainer.nproc: 1 -> 2" in str(caught.value)
    assert "flotilla down" in caught.value.next_step
    assert stacks.identities() == before


async def test_down_leaves_no_process_no_port_and_no_shared_memory(stacks) -> None:
    stacks.behave(generator_0="parent", trainer="parent")
    result = await stacks.up(stacks.config())
    assert len(stacks.segments()) == 2
    # Launcher, guardian, NATS and three services with a watcher each, and two grandchildren of each parent.
    assert len(stacks.processes()) == 14

    assert await local.down(stacks.paths())
    assert stacks.processes() == set()
    assert not any(answers(status.address) for status in result.processes)
    assert stacks.segments() == set()
    assert not Path(result.launcher.socket).exists()
    paths = stacks.paths()
    assert list(paths.instances.iterdir()) == []
    assert not paths.launcher_file.exists() and not paths.processes_file.exists()
    assert not await local.down(paths), "a second down finds nothing"


async def test_service_that_dies_at_start_gives_one_message_and_nothing_stays(stacks) -> None:
    stacks.behave(generator_0="die")
    with pytest.raises(FailedPrecondition) as caught:
        await stacks.up(stacks.config())
    message = str(caught.value)
    assert "generator-0 did not start" in message
    assert "exited with code 7 before it was ready: RuntimeError: the model folder is empty" in message
    assert "\n  bye\n" in message, "the end of its log is shown"
    assert str(stacks.paths().log_file("generator-0")) in caught.value.next_step
    assert stacks.processes() == set()
    assert find(stacks.paths()) is None


async def test_service_that_never_gets_ready_fails_at_the_stated_limit(stacks) -> None:
    stacks.behave(trainer="hang")
    with pytest.raises(DeadlineExceeded, match="trainer was not ready after 5 s"):
        await stacks.up(stacks.config(ready_timeout_s=5.0))
    assert stacks.processes() == set()


async def test_killed_service_is_restarted_without_its_descendants_and_nats_at_the_same_address(
    stacks,
) -> None:
    stacks.behave(generator_0="parent")
    result = await stacks.up(stacks.config())
    old = stacks.identities()["generator-0"]
    count = len(stacks.processes())
    os.kill(old.pid, signal.SIGKILL)
    async with LauncherClient.open(result.launcher) as launcher:
        status = await ready_again(launcher, "generator-0")
        assert status.restarts == 1
        assert status.pid not in (0, old.pid)
        assert len(stacks.processes()) == count, "one new service, one new grandchild, none of the old ones"

        os.kill(stacks.identities()["nats"].pid, signal.SIGKILL)
        status = await ready_again(launcher, "nats")
        assert status.address == urlsplit(result.launcher.nats_url).netloc


async def test_nats_out_of_restart_budget_is_failed_and_up_starts_it_again_at_the_same_address(
    stacks,
) -> None:
    config = stacks.config(restart_budget=1)
    result = await stacks.up(config)
    async with LauncherClient.open(result.launcher) as launcher:
        os.kill(stacks.identities()["nats"].pid, signal.SIGKILL)
        await ready_again(launcher, "nats")
        os.kill(stacks.identities()["nats"].pid, signal.SIGKILL)
        await until(launcher, "nats", lambda s: s.state == PROCESS_STATE_FAILED)
        again = await stacks.up(config)
        assert again.changed
        assert {status.state for status in again.processes} == {PROCESS_STATE_READY}
        nats = next(status for status in again.processes if status.name == "nats")
        assert answers(nats.address) and nats.address == urlsplit(result.launcher.nats_url).netloc
        os.kill(nats.pid, signal.SIGKILL)
        await ready_again(launcher, "nats")


async def test_nats_whose_record_cannot_be_written_uses_up_its_budget_and_starts_again_later(
    tmp_path: Path,
) -> None:
    full = False

    def write() -> None:
        if full:
            raise OSError("no space left on device")

    nats = NatsProcess(
        tmp_path,
        credential=credential(tmp_path),
        wrapper=under_lease(tmp_path),
        restart_budget=2,
        on_change=write,
    )
    await nats.start()
    try:
        full = True
        os.kill(nats.status().pid, signal.SIGKILL)
        async with asyncio.timeout(15):
            while nats.status().state != PROCESS_STATE_FAILED:
                await asyncio.sleep(0.02)
        with pytest.raises(OSError, match="no space left"):
            await nats.start_again()
        failed = nats.status()
        assert (failed.state, failed.error) == (PROCESS_STATE_FAILED, "no space left on device")
        full = False
        assert await nats.start_again()
        assert (nats.status().state, nats.status().restarts) == (PROCESS_STATE_READY, 0)
        assert not await nats.start_again(), "what runs is left alone"
    finally:
        full = False
        await nats.stop()


async def test_up_starts_what_is_out_of_restart_budget_also_after_a_repair_that_failed(
    stacks, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    stacks.behave(generator_0=f"die while {broken}")
    config = stacks.config(restart_budget=0)
    result = await stacks.up(config)
    os.kill(stacks.identities()["trainer"].pid, signal.SIGKILL)
    async with LauncherClient.open(result.launcher) as launcher:
        status = await until(launcher, "trainer", lambda s: s.state == PROCESS_STATE_FAILED)
    assert "was killed by SIGKILL" in status.error
    again = await stacks.up(config)
    assert again.changed
    assert {status.state for status in again.processes} == {PROCESS_STATE_READY}

    killed = [stacks.identities()[name] for name in ("trainer", "generator-0")]
    broken.touch()
    for identity in killed:
        os.kill(identity.pid, signal.SIGKILL)
    async with LauncherClient.open(result.launcher) as launcher:
        for name in ("trainer", "generator-0"):
            await until(launcher, name, lambda s: s.state == PROCESS_STATE_FAILED)
        with pytest.raises(FailedPrecondition, match="generator-0 did not start"):
            await stacks.up(config)
        await until(launcher, "trainer", lambda s: s.state == PROCESS_STATE_STOPPED)
    broken.unlink()
    repaired = await stacks.up(config)
    assert repaired.changed
    assert {status.state for status in repaired.processes} == {PROCESS_STATE_READY}


async def test_two_stacks_run_side_by_side(stacks) -> None:
    one, two = await asyncio.gather(stacks.up(stacks.config("one")), stacks.up(stacks.config("two")))
    addresses = [status.address for result in (one, two) for status in result.processes]
    assert len(set(addresses)) == 2 * len(SERVICES)
    assert await local.down(stacks.paths("one"))
    assert all(answers(status.address) for status in two.processes)


async def test_scale_adds_and_removes_the_highest_replicas_only(stacks) -> None:
    result = await stacks.up(stacks.config())
    before = stacks.identities()
    async with LauncherClient.open(result.launcher) as launcher:
        grown = await launcher.scale(SERVICE_KIND_GENERATOR, 3, timeout_s=30)
        assert [status.name for status in grown] == ["generator-0", "generator-1", "generator-2"]
        assert {status.state for status in grown} == {PROCESS_STATE_READY}
        shrunk = await launcher.scale(SERVICE_KIND_GENERATOR, 1, timeout_s=30)
        assert [status.name for status in shrunk] == ["generator-0"]
        with pytest.raises(InvalidRequest, match="trainer cannot be scaled"):
            await launcher.scale(SERVICE_KIND_TRAINER, 2, timeout_s=5)
        with pytest.raises(InvalidRequest, match="256 is the limit"):
            await launcher.scale(SERVICE_KIND_GENERATOR, 257, timeout_s=5)
    assert stacks.identities() == before


async def test_scale_leaves_the_generators_of_a_judge_as_they_are(stacks) -> None:
    judges = {"careful": FleetJudgeConfig(model="models/judge", replicas=2)}
    result = await stacks.up(stacks.config(judges=judges))
    before = stacks.identities()
    assert {"judge-careful-0", "judge-careful-1", "generator-0"} <= before.keys()
    async with LauncherClient.open(result.launcher) as launcher:
        grown = await launcher.scale(SERVICE_KIND_GENERATOR, 2, timeout_s=30)
        assert [status.name for status in grown] == ["generator-0", "generator-1"]
        await launcher.scale(SERVICE_KIND_GENERATOR, 1, timeout_s=30)
    assert stacks.identities() == before


@pytest.mark.parametrize("how", ["down", "SIGTERM"])
async def test_stop_interrupts_a_scale_that_waits_for_its_replica(stacks, how: str) -> None:
    stacks.behave(generator_1="hang")
    result = await stacks.up(stacks.config())
    async with LauncherClient.open(result.launcher) as launcher:
        scale = asyncio.create_task(launcher.scale(SERVICE_KIND_GENERATOR, 2, timeout_s=60))
        await until(launcher, "generator-1", lambda s: s.pid)
        async with asyncio.timeout(15):
            if how == "down":
                assert await local.down(stacks.paths())
            else:
                os.kill(result.launcher.pid, signal.SIGTERM)
            with pytest.raises(FailedPrecondition, match="stack 'tiny' is being stopped"):
                await scale
    await stacks.wait_for("every process to end", lambda: stacks.processes() == set())


async def test_down_that_takes_too_long_says_what_to_do(stacks, monkeypatch) -> None:
    stacks.behave(trainer="stubborn")
    result = await stacks.up(stacks.config())
    with monkeypatch.context() as patched, pytest.raises(DeadlineExceeded) as caught:
        patched.setattr(client, "_STOP_LIMIT_S", 1.0)
        await local.down(stacks.paths())
    os.kill(stacks.identities()["trainer"].pid, signal.SIGKILL)
    assert f"kill -9 {result.launcher.pid}" in caught.value.next_step
    await stacks.wait_for("the stop to end all the same", lambda: stacks.processes() == set())


async def test_attached_service_is_listed_and_never_touched(stacks) -> None:
    other = await stacks.up(stacks.config("other"))
    theirs = next(status for status in other.processes if status.name == "generator-0")
    stacks.paths().make()
    # Who attaches a service of another stack has its credential, too.
    write_secret(stacks.paths().credential_file, stacks.paths("other").credential_file.read_text())
    result = await stacks.up(stacks.config(generator={"replicas": 0, "attach": [theirs.address]}))
    listed = next(status for status in result.processes if status.kind == SERVICE_KIND_GENERATOR)
    assert (listed.state, listed.address, listed.pid) == (PROCESS_STATE_ATTACHED, theirs.address, 0)
    assert await local.down(stacks.paths())
    assert answers(theirs.address)


async def test_reused_pid_is_never_taken_for_ours(stacks) -> None:
    """After a reboot or a wrap-around, the pid in a state file may be anyone's."""
    paths = stacks.paths()
    paths.make()
    stranger = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    try:
        identity = ProcessIdentity.of(stranger.pid)
        earlier = {"pid": stranger.pid, "start_ticks": identity.start_ticks - 1, "boot_id": identity.boot_id}
        record = {"name": "generator-0", "identity": earlier, "mark": "no such mark", "shared_memory": []}
        paths.processes_file.write_text(json.dumps({"processes": [record]}))
        assert await local.down(paths)
        assert identity.alive()
    finally:
        stranger.kill()
        await stranger.wait()


async def test_service_that_ignores_sigterm_is_killed_after_its_grace(stacks) -> None:
    stacks.behave(reward_0="stubborn")
    service = reward(stacks)
    service.start()
    await service.ready()
    await service.stop(grace_s=0.3)
    assert service.state == PROCESS_STATE_STOPPED
    assert stacks.processes() == set()


async def test_stop_while_a_dead_service_is_buried_leaves_no_grandchild(stacks, monkeypatch) -> None:
    stacks.behave(reward_0="parent")
    service = reward(stacks)
    service.start()
    await service.ready()
    begun, stopped = threading.Event(), threading.Event()

    def slow_at_first(*of: object) -> list[ProcessIdentity]:
        if not begun.is_set():
            begun.set()
            stopped.wait(15)
        return tree_of(*of)

    monkeypatch.setattr(service_process, "tree_of", slow_at_first)
    os.kill(service.child.identity.pid, signal.SIGKILL)
    try:
        assert await asyncio.to_thread(begun.wait, 15)
        await service.stop()
        assert service.state == PROCESS_STATE_STOPPED
        assert stacks.processes() == set()
        assert stacks.segments() == set()
    finally:
        stopped.set()
        for pid in stacks.processes():
            os.kill(pid, signal.SIGKILL)


async def test_an_unforeseen_error_at_start_fails_the_slot_and_whoever_waits_for_it(stacks, tmp_path) -> None:
    service = stacks.service([sys.executable], log_path=tmp_path)
    service.start()
    with pytest.raises(Internal, match="IsADirectoryError"):
        async with asyncio.timeout(5):
            await service.ready()
    assert service.state == PROCESS_STATE_FAILED


async def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    with (
        hold_lock(tmp_path / "lock", timeout_s=0) as first,
        hold_lock(tmp_path / "lock", timeout_s=0.1) as second,
    ):
        assert first and not second
    with hold_lock(tmp_path / "lock", timeout_s=0) as again:
        assert again


async def test_a_down_that_waits_for_another_command_ends_at_once_on_ctrl_c(stacks) -> None:
    paths = stacks.paths()
    paths.make()
    script = f"""if True:
        import asyncio, pathlib, signal
        from flotilla_launch import local, paths
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        stack = paths.StackPaths(pathlib.Path({str(paths.directory)!r}))
        asyncio.run(local.down(stack, on_wait=lambda why: print(why, flush=True)))"""
    with hold_lock(paths.up_lock_file, timeout_s=0) as held:
        assert held
        waiter = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            async with asyncio.timeout(15):
                assert b"waiting for it to end" in await waiter.stdout.readline()
            waiter.send_signal(signal.SIGINT)
            async with asyncio.timeout(2):
                assert await waiter.wait() == -signal.SIGINT
        finally:
            if waiter.returncode is None:
                waiter.kill()
                await waiter.wait()


def reward(stacks) -> ServiceProcess:
    """A supervised service without a supervisor."""
    paths = stacks.paths()
    paths.make()
    paths.stack_file.write_text(dump_yaml(stacks.config()))
    options = {"--name": "reward-0", "--stack": paths.stack_file, "--nats": "-", "--otlp": "-", "--port": 0}
    command = [str(stacks.executables / "flotilla-reward"), *(str(p) for o in options.items() for p in o)]
    return stacks.service(command)


async def ready_again(launcher: LauncherClient, name: str):
    return await until(launcher, name, lambda s: s.state == PROCESS_STATE_READY and s.restarts > 0)


def _open_to_others(directory: Path) -> list[str]:
    """What below a folder, itself included, group or others may open."""
    entries = [directory, *directory.rglob("*")]
    return [str(entry) for entry in entries if not entry.is_symlink() and entry.stat().st_mode & 0o077]


async def test_nobody_else_can_open_what_a_stack_writes(stacks) -> None:
    umask = os.umask(0o022)
    try:
        await stacks.up(stacks.config())
    finally:
        os.umask(umask)
    directory = stacks.paths().directory
    assert _open_to_others(directory) == []
    for file in ("authority.pem", "credential.pem"):
        assert (directory / file).stat().st_mode & 0o777 == 0o600
    await local.down(stacks.paths())
    assert _open_to_others(directory) == []


async def test_up_closes_what_an_older_release_left_open_and_says_so_in_one_line(stacks, tmp_path) -> None:
    directory = stacks.paths().directory
    (directory / "runs" / "old").mkdir(parents=True)
    (directory / "ledger.sqlite").write_text("")
    (directory / "runs" / "old" / "samples").write_text("secret thoughts")
    (directory / "runs" / "old" / "tool").write_text("")
    (directory / "runs" / "old" / "tool").chmod(0o755)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours to change")
    elsewhere.chmod(0o644)
    (directory / "runs" / "old" / "link").symlink_to(elsewhere)
    said: list[str] = []
    for _ in range(2):
        await local.up(stacks.config(), executables=stacks.executables, on_tightened=said.append)
        await local.down(stacks.paths())
    assert len(said) == 1 and str(directory) in said[0], said
    assert _open_to_others(directory) == []
    assert (directory / "runs" / "old" / "tool").stat().st_mode & 0o777 == 0o700
    assert elsewhere.stat().st_mode & 0o777 == 0o644


async def test_what_lies_open_in_a_closed_folder_is_closed_without_a_word(stacks) -> None:
    paths = stacks.paths()
    assert paths.make() == 0
    (paths.directory / "left-open").write_text("")
    (paths.directory / "left-open").chmod(0o644)
    assert paths.make() == 0, "nobody else could reach it"
    assert _open_to_others(paths.directory) == []


async def test_a_credential_that_others_can_read_stops_up_before_anything_starts(stacks, tmp_path) -> None:
    file = credential(tmp_path).path
    file.chmod(0o644)
    with pytest.raises(InvalidConfig, match=r"0644.*chmod 600"):
        await stacks.up(stacks.config(bind={"credential_file": str(file)}))
    assert stacks.processes() == set()


async def test_the_credential_of_a_person_starts_no_stack(stacks, tmp_path) -> None:
    file = role_credential(tmp_path, "admin").path
    with pytest.raises(InvalidConfig, match="for callers"):
        await stacks.up(stacks.config(bind={"credential_file": str(file)}))
    assert stacks.processes() == set()


async def test_a_stack_of_an_older_release_gets_a_credential_and_says_once_that_its_token_is_of_no_use(
    stacks,
) -> None:
    paths = stacks.paths()
    paths.make()
    token = paths.directory / "token"
    token.write_text("secret\n")
    said: list[str] = []
    for _ in range(2):
        await local.up(stacks.config(), executables=stacks.executables, on_wait=said.append)
    (line,) = said
    assert str(token) in line and "token create" in line and "\n" not in line


def test_the_launchers_socket_never_lies_in_a_folder_that_somebody_else_linked(
    stacks, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "anywhere").mkdir(mode=0o700)
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "flotilla").symlink_to(tmp_path / "anywhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    with pytest.raises(FailedPrecondition, match="open to other users"):
        stacks.paths().socket()
