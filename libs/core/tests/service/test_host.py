"""The life of a service process, with a real NATS server and real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import registration_pb2 as reg
from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla_core import rpc
from flotilla_core.bus import Bus, Login, NatsServer, Registry
from flotilla_core.config import BindConfig
from flotilla_core.config.stack import NatsConfig
from flotilla_core.errors import DeadlineExceeded, Exhausted
from flotilla_core.files import make_private_folder
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_core.trust import Credential
from flotilla_testing.credentials import credential

# What a service's main.py looks like; its behaviour is chosen by the first argument.
SERVICE = """
import asyncio, sys, threading
from flotilla.common.v1 import registration_pb2 as reg
from flotilla_core.errors import Mismatch
from flotilla_core.service import run_service

class Toy:
    def __init__(self, host): self.host = host
    def add_to(self, server): pass
    async def start(self):
        if MODE == "refuses": raise Mismatch("tokenizers differ", where="model", why="digest", next_step="Fix it.")
        if MODE == "breaks": 1 / 0
        if MODE == "boots for ever": await asyncio.Event().wait()
        if MODE == "fails later":
            asyncio.get_running_loop().call_later(0.2, self.host.failed, Mismatch("the canary died"))
    def describe(self, registration): registration.capacity["slots"] = 4
    async def check(self): return []
    async def dump_stacks(self): return []
    async def drain(self, grace_s): print("drained", flush=True)
    async def stop(self): print("stopped by host", flush=True)

def first(arguments):
    print(f"{arguments.name} first, threads: {threading.active_count()}", flush=True)
    if MODE == "lacks a package": import no_such_package

MODE = sys.argv.pop(1)
sys.exit(run_service(reg.SERVICE_KIND_REWARD, Toy, first=first))
"""


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = await NatsServer.start(
        tmp_path / "state" / "toys" / "nats", credential=credential(tmp_path / "state" / "toys")
    )
    yield server
    await server.stop()


@pytest.fixture
def stack_file(tmp_path: Path) -> Path:
    file = tmp_path / "stack.yaml"
    file.write_text(f"name: toys\nstate_dir: {tmp_path}/state\n")
    directory = tmp_path / "state" / "toys"
    make_private_folder(directory)
    credential(directory)
    return file


class Toy:
    """A started service process and what it wrote."""

    def __init__(self, group: ProcessGroup, directory: Path) -> None:
        self.group = group
        self.directory = directory

    @classmethod
    async def start(cls, mode: str, tmp_path: Path, stack_file: Path, *more: str) -> Toy:
        script = tmp_path / "toy.py"
        script.write_text(SERVICE)
        directory = tmp_path / "state" / "toys"
        log = directory / "logs" / "reward-0.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            command = [
                sys.executable,
                str(script),
                mode,
                "--name",
                "reward-0",
                "--stack",
                str(stack_file),
                *more,
            ]
            return cls(await ProcessGroup.start(command, stdout=out, stderr=out), directory)

    @property
    def output(self) -> str:
        return (self.directory / "logs" / "reward-0.log").read_text()

    async def ended(self) -> int:
        return await asyncio.wait_for(self.group.wait(), 20)

    async def address(self) -> str:
        file = self.directory / "instances" / "reward-0.json"
        async with asyncio.timeout(20):
            while not file.exists():
                await asyncio.sleep(0.02)
        entry = json.loads(file.read_text())
        assert entry["pid"] == self.group.pid
        return str(entry["address"])


async def state_of(
    views: AsyncIterator[dict[str, reg.Registration]], state: int | None
) -> reg.Registration | None:
    """The registration once it has `state`; None asks for its absence."""
    async with asyncio.timeout(20):
        async for view in views:
            found = next(iter(view.values()), None)
            if (found.state if found else None) == state:
                return found
    raise AssertionError("the registry ended")


async def test_life_of_a_service_shows_in_registry_and_health(
    tmp_path: Path, nats: NatsServer, stack_file: Path
) -> None:
    toy = await Toy.start("serves", tmp_path, stack_file, "--nats", nats.url)
    bus = await Bus.connect(nats.url, nats.login)
    async with aclosing(Registry(bus).watch()) as views:
        ready = await state_of(views, reg.INSTANCE_STATE_READY)
        assert ready is not None
        assert ready.capacity["slots"] == 4
        assert ready.pid == toy.group.pid
        assert ready.address == await toy.address()

        channel = rpc.connect(ready.address, credential=Credential.of_stack(BindConfig(), toy.directory))
        operate = OperateServiceStub(channel)
        description = await rpc.unary(operate.Describe, pb.DescribeRequest(), timeout_s=5)
        assert description.registration.instance_id == ready.instance_id
        assert description.source_path.endswith("toy.py")
        checks = await rpc.unary(operate.Check, pb.CheckRequest(), timeout_s=5)
        assert [result.status for result in checks.results] == [pb.CHECK_STATUS_PASSED] * 2
        stacks = await rpc.unary(operate.DumpStacks, pb.DumpStacksRequest(), timeout_s=5)
        assert "registry-heartbeat" in stacks.processes[0].text
        assert "_keep_alive" in stacks.processes[0].text
        async with aclosing(
            rpc.server_stream(operate.TailLog, pb.TailLogRequest(lines=1, follow=True), idle_timeout_s=5)
        ) as lines:
            last = json.loads((await anext(lines)).line)
            assert {"time", "level", "event", "service"} <= last.keys()
            assert last["event"] == "ready"
        profile = pb.ProfileRequest(samples_per_second=100)
        profile.duration.FromMilliseconds(200)
        answer = await rpc.unary(operate.Profile, profile, timeout_s=5)
        assert "MainThread;" in answer.collapsed_stacks
        # A caller that goes away ends its profile, and the next one may ask.
        profile.duration.FromMilliseconds(100_000)
        with pytest.raises(DeadlineExceeded):
            await rpc.unary(operate.Profile, profile, timeout_s=0.5)
        profile.duration.FromMilliseconds(1)
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(Exhausted):
                    await rpc.unary(operate.Profile, profile, timeout_s=10)
                    break

        await rpc.unary(operate.Drain, pb.DrainRequest(), timeout_s=5)
        await state_of(views, reg.INSTANCE_STATE_DRAINING)
        await state_of(views, None)
    assert await toy.ended() == 0
    assert toy.output.index("drained") < toy.output.index("stopped by host")
    assert not (toy.directory / "instances" / "reward-0.json").exists()
    await channel.close()
    await bus.close()


async def test_service_started_by_hand_finds_the_running_stack(
    tmp_path: Path, nats: NatsServer, stack_file: Path
) -> None:
    directory = tmp_path / "state" / "toys"
    (directory / "launcher.json").write_text(json.dumps({"nats_url": nats.url, "otlp": ""}))
    toy = await Toy.start("serves", tmp_path, stack_file)
    await toy.address()
    os.kill(toy.group.pid, signal.SIGTERM)
    assert await toy.ended() == 0


async def test_a_host_to_advertise_and_a_drain_time_are_given_on_the_command_line(
    tmp_path: Path, nats: NatsServer, stack_file: Path
) -> None:
    given = ["--nats", nats.url, "--advertise-host", "localhost", "--drain-grace", "7"]
    toy = await Toy.start("serves", tmp_path, stack_file, *given)
    address = await toy.address()
    assert address.startswith("localhost:")
    channel = rpc.connect(address, credential=Credential.of_stack(BindConfig(), toy.directory))
    operate = OperateServiceStub(channel)
    async with asyncio.timeout(20):
        while "ready" not in toy.output:
            await asyncio.sleep(0.02)
    await rpc.unary(operate.Describe, pb.DescribeRequest(), timeout_s=5)  # the name is one that it answers to
    os.kill(toy.group.pid, signal.SIGTERM)
    assert await toy.ended() == 0
    assert '"grace_s": 7' in toy.output
    await channel.close()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuses", "error: tokenizers differ (model): digest. Fix it.\n"),
        ("breaks", "error: the service failed (reward): ZeroDivisionError: division by zero\n"),
        ("fails later", "error: the canary died\n"),
    ],
)
async def test_failure_ends_in_one_message_and_exit_code_1(
    mode: str, message: str, tmp_path: Path, nats: NatsServer, stack_file: Path
) -> None:
    toy = await Toy.start(mode, tmp_path, stack_file, "--nats", nats.url)
    assert await toy.ended() == 1
    assert toy.output.endswith(message)
    assert "stopped by host" in toy.output


async def test_what_a_service_does_first_sees_one_thread_and_fails_with_a_message(
    tmp_path: Path, nats: NatsServer, stack_file: Path
) -> None:
    toy = await Toy.start("lacks a package", tmp_path, stack_file, "--nats", nats.url)
    assert await toy.ended() == 1
    assert toy.output.startswith("reward-0 first, threads: 1\n")
    why = "ModuleNotFoundError: No module named 'no_such_package'"
    assert toy.output.endswith(f"error: the service failed (reward): {why}\n")


async def test_a_replica_on_another_host_advertises_its_own_name_and_says_where_its_credential_is(
    tmp_path: Path, nats: NatsServer, stack_file: Path
) -> None:
    copy = (tmp_path / "state" / "toys" / "credential.pem").rename(tmp_path / "copy.pem")
    stack_file.write_text(f"{stack_file.read_text()}bind: {{credential_file: {copy}}}\n")
    toy = await Toy.start(
        "serves", tmp_path, stack_file, "--nats", nats.url, "--advertise-host", "reward-7.example"
    )
    login = Login.of_stack(NatsConfig(), toy.directory, Credential(copy))
    bus = await Bus.connect(nats.url, login)
    async with aclosing(Registry(bus).watch()) as views:
        ready = await state_of(views, reg.INSTANCE_STATE_READY)
    assert ready is not None and ready.address.startswith("reward-7.example:")
    announced = toy.directory / "instances" / "reward-0.json"
    assert json.loads(announced.read_text())["credential_file"] == str(copy)
    await bus.close()
    await toy.group.stop(5)


async def test_start_can_be_interrupted(tmp_path: Path, nats: NatsServer, stack_file: Path) -> None:
    toy = await Toy.start("boots for ever", tmp_path, stack_file, "--nats", nats.url)
    await toy.address()
    os.kill(toy.group.pid, signal.SIGTERM)
    assert await toy.ended() == 0


async def test_without_a_stack_the_message_says_how_to_name_nats(tmp_path: Path, stack_file: Path) -> None:
    toy = await Toy.start("serves", tmp_path, stack_file)
    assert await toy.ended() == 1
    assert "error: no NATS server is known" in toy.output
    assert "--nats URL" in toy.output
