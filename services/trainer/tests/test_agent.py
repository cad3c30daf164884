"""An agent runs ranks for a front on another host: bytes travel, and nobody's end leaves a process behind.

The ranks here are small processes that send back what they read; the rest is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import IO, cast

import psutil
import pytest

from flotilla.common.v1 import registration_pb2 as reg
from flotilla.trainer.v1 import ranks_pb2 as pb
from flotilla.trainer.v1.ranks_pb2_grpc import RankServiceStub
from flotilla_core import rpc
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.config import StackConfig
from flotilla_core.errors import InvalidRequest, RankFailed, Unavailable
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.service import Activities, Host
from flotilla_core.transfer import FileServicer
from flotilla_testing.credentials import credential
from flotilla_testing.files import files_in
from flotilla_testing.servers import serving
from flotilla_trainer.agent import RankServicer
from flotilla_trainer.gang.fork_server import RankForkServer, RankOrder
from flotilla_trainer.gang.hosts import AgentHost, GangHosts
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.remote_rank import RemoteRank
from flotilla_trainer.wire.settings import SHARDS

LIMIT_S = 20.0
SILENCE_S = 2.0
ECHO = (
    "import socket, sys\n"
    "line = socket.socket(fileno=int(sys.argv[1]))\n"
    "print('hello', flush=True)\n"
    "while data := line.recv(1 << 20):\n"
    "    if data == b'die':\n"
    "        raise SystemExit('told to die')\n"
    "    line.sendall(data)\n"
)


class EchoChild:
    """A process that sends back what it reads, as the fork server hands one out."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.returncode: int | None = None

    async def wait(self) -> None:
        self.returncode = await asyncio.to_thread(self._process.wait)

    def send_signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        self._process.kill()


class EchoForkServer:
    """Starts such processes."""

    async def rank(self, order: RankOrder, line: socket.socket, log: IO[bytes], limit_s: float) -> EchoChild:
        command = [sys.executable, "-c", ECHO, str(line.fileno())]
        process = subprocess.Popen(command, pass_fds=[line.fileno()], stdout=log, stderr=log)
        return EchoChild(process)

    def close(self) -> None:
        """Nothing is shared."""


class Pair:
    """A front with its files, and the agent of host b with its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.credential = credential(folder)
        self.stack = StackConfig(
            model=folder / "model",
            trainer={
                "nproc": 3,
                "rank_timeout_s": SILENCE_S,
                "hosts": [{"name": "a", "ranks": 1}, {"name": "b", "ranks": 2}],
            },
        )
        self.plan = GangPlan.of_stack(
            self.stack, "trainer", "trainer-x", folder / "model", folder / "a" / "logs"
        )
        self.front, self.files = files_in(folder / "a"), files_in(folder / "b")
        self.there = GangPlan.of_stack(
            self.stack,
            "trainer",
            "agent-x",
            Path(),
            folder / "b" / "logs",
            credential_file="/b/credential.pem",
            host="b",
        )
        host = cast(Host, SimpleNamespace(files=self.files))
        fork_server = cast(RankForkServer, EchoForkServer())
        self.agent = RankServicer(self.there, fork_server, host, folder / "b" / "parts")
        self.servers: list[AsyncExitStack] = []
        self.address = ""

    async def start(self) -> None:
        self.front.address = await self._serve(FileServicer(self.front.offers))
        self.files.address = self.address = await self._serve(FileServicer(self.files.offers), self.agent)

    async def _serve(self, *servicers: object) -> str:
        self.servers.append(AsyncExitStack())
        return await self.servers[-1].enter_async_context(serving(*servicers, credential=self.credential))

    async def stop_agent(self) -> None:
        await self.servers.pop().aclose()

    async def views(self) -> AsyncGenerator[dict[str, reg.Registration]]:
        """The registry with the agent in it."""
        agent = reg.Registration(
            kind=reg.SERVICE_KIND_RANKS,
            name="trainer-at-b",
            address=self.address,
            state=reg.INSTANCE_STATE_READY,
            protocol_version=PROTOCOL_VERSION,
        )
        yield {"trainer-at-b-x": agent}
        await asyncio.Event().wait()

    def hosts(self) -> GangHosts:
        fork_server = cast(RankForkServer, EchoForkServer())
        other = AgentHost(self.plan, "b", self.plan.places["b"], self.front, Activities())
        return GangHosts(
            self.plan,
            fork_server,
            [other],
            self.views,
            lambda address: rpc.connect(address, credential=self.credential),
        )


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    made = Pair(tmp_path)
    await made.start()
    yield made
    await made.agent.end()
    for server in made.servers:
        await server.aclose()


@pytest.fixture
async def host(pair: Pair) -> AsyncIterator[AgentHost]:
    """Host b, as the front uses it."""
    hosts = pair.hosts()
    await hosts.reached(LIMIT_S)
    other = hosts.all[1]
    assert isinstance(other, AgentHost)
    yield other
    await hosts.close()


def living(pid: int) -> ProcessIdentity:
    process = ProcessIdentity.of(pid)
    assert process is not None
    return process


async def over(process: ProcessIdentity) -> None:
    async with asyncio.timeout(LIMIT_S):
        while process.alive():
            await asyncio.sleep(0.02)


async def echoed(rank: RemoteRank, data: bytes) -> bytes:
    rank.writer.writelines([data])
    async with asyncio.timeout(LIMIT_S):
        await rank.writer.drain()
        return await rank.reader.readexactly(len(data))


async def test_a_rank_reads_and_writes_what_it_would_on_the_hosts_own_socket(host: AgentHost) -> None:
    rank = await host.start(1)
    data = bytes(range(256)) * (5 << 12)
    assert await echoed(rank, data) == data
    assert rank.ended() == ""
    assert rank.log.endswith("b/logs/trainer.rank-1.log on b")
    rank.kill()
    await rank.gone()


async def test_a_rank_is_killed_when_its_call_is_cut(host: AgentHost) -> None:
    rank = await host.start(1)
    process = living(rank.pid)
    rank.kill()
    await rank.gone()
    await over(process)
    assert rank.ended() == "was killed by its front"


async def test_a_rank_is_killed_when_its_front_is_silent(pair: Pair) -> None:
    silent = asyncio.Event()

    async def requests() -> AsyncIterator[pb.RunRankRequest]:
        yield pb.RunRankRequest(start=pb.RankStart(rank=1, silence_s=0.5))
        await silent.wait()

    async with rpc.connect(pair.address, credential=pair.credential) as channel, asyncio.timeout(LIMIT_S):
        stream = rpc.duplex(RankServiceStub(channel).RunRank, requests(), idle_timeout_s=LIMIT_S)
        pid = 0
        async with contextlib.aclosing(stream) as responses:
            async for response in responses:
                pid = pid or response.born.pid
    assert not psutil.pid_exists(pid)
    assert pair.agent.ranks == {}


async def test_a_rank_that_ends_says_how_and_with_which_last_line(host: AgentHost) -> None:
    rank = await host.start(2)
    rank.writer.writelines([b"die"])
    async with asyncio.timeout(LIMIT_S):
        await rank.gone()
    assert rank.ended() == "exited with status 1"
    assert rank.last_log_line() == "told to die"


async def test_a_rank_is_lost_with_its_agent_and_the_message_says_so(pair: Pair, host: AgentHost) -> None:
    rank = await host.start(1)
    process = living(rank.pid)
    await pair.stop_agent()
    async with asyncio.timeout(LIMIT_S):
        await rank.gone()
    assert rank.ended().startswith("was lost with its agent")
    assert rank.writer.is_closing()
    await rank.writer.drain()
    await over(process)


async def test_of_a_number_there_is_one_rank_the_newest(host: AgentHost) -> None:
    older = await host.start(1)
    process = living(older.pid)
    newer = await host.start(1)
    assert not process.alive()
    assert await echoed(newer, b"here") == b"here"
    async with asyncio.timeout(LIMIT_S):
        await older.gone()
    assert older.ended() == "was killed by SIGKILL"
    newer.kill()


async def test_a_rank_of_another_host_is_refused(host: AgentHost) -> None:
    with pytest.raises(RankFailed, match="does not belong on this host"):
        await host.start(0)


async def test_a_stopped_rank_is_known_as_one(host: AgentHost) -> None:
    rank = await host.start(1)
    assert not await rank.is_stopped()
    process = living(rank.pid)
    psutil.Process(rank.pid).suspend()
    async with asyncio.timeout(LIMIT_S):
        while not await rank.is_stopped():
            await asyncio.sleep(0.02)
    assert await rank.stacks() == ""
    rank.kill()
    await over(process)


async def test_a_gang_whose_agent_is_missing_says_which_one_and_how_to_start_it(pair: Pair) -> None:
    await pair.stop_agent()
    hosts = pair.hosts()
    with pytest.raises(Unavailable, match="host b: ") as caught:
        await hosts.reached(0.2)
    assert "flotilla-ranks --name trainer-at-b" in str(caught.value)
    await hosts.close()


async def test_a_rank_is_told_the_files_of_its_own_host(pair: Pair, host: AgentHost) -> None:
    told = await host.settings()
    assert told.credential_file == "/b/credential.pem"
    assert told.model == str(pair.folder / "model"), "the folder is here as well: it is used in place"
    assert await host.told("train", {"refuse_above": None}) == {}

    function = pair.folder / "losses.py"
    function.write_text("def loss(tokens):\n    return tokens\n")
    section = {"loss": {"type": f"{function}:loss"}, "advantage": {"type": "grpo"}}
    moved = await host.told("open_session", {"objective": {"kind": "policy", "section": section}})
    assert moved["objective"]["section"]["loss"]["type"] == f"{function}:loss"
    assert moved["objective"]["section"]["advantage"] == {"type": "grpo"}


async def test_a_folder_that_is_not_on_the_agents_host_is_fetched_from_the_front(
    pair: Pair, host: AgentHost
) -> None:
    shelf = CheckpointShelf(pair.folder / "checkpoints")
    folder = shelf.begin("step-000001")
    (folder / SHARDS).mkdir()
    (folder / SHARDS / "rank-0.safetensors").write_bytes(b"numbers")
    Manifest.seal(folder)
    sealed = shelf.publish("step-000001")
    in_place = await host.told("load_checkpoint", {"folder": str(sealed)})
    assert in_place == {"folder": str(sealed)}

    offered = pair.front.offer(sealed, sealed=True)
    offered.address, offered.path = pair.front.address, "/not/there"
    copy = await pair.files.here(offered, sealed=True)
    assert copy.parent == pair.folder / "b" / "files"
    assert (copy / SHARDS / "rank-0.safetensors").read_bytes() == b"numbers"


async def test_what_ranks_of_another_host_wrote_is_beside_what_the_fronts_own_wrote(
    pair: Pair, host: AgentHost
) -> None:
    folder = pair.folder / ".step-000002.beef.writing"
    (folder / SHARDS).mkdir(parents=True)
    (folder / SHARDS / "rank-0.safetensors").write_bytes(b"own")
    told = await host.told("snapshot", {"folder": str(folder), "report": 1})
    part = Path(told["folder"])
    assert part.is_relative_to(pair.folder / "b") and list(part.iterdir()) == []
    await host.collect(folder)  # Ranks of a further copy write nothing.
    (part / SHARDS).mkdir()
    (part / SHARDS / "rank-1.safetensors").write_bytes(b"theirs")
    await host.collect(folder)
    found = {path.name: path.read_bytes() for path in (folder / SHARDS).iterdir()}
    assert found == {"rank-0.safetensors": b"own", "rank-1.safetensors": b"theirs"}
    assert [path.name for path in folder.iterdir()] == [SHARDS]


async def test_the_part_of_an_earlier_checkpoint_is_removed(pair: Pair, host: AgentHost) -> None:
    first = Path((await host.told("snapshot", {"folder": "/x/.step-000001.a.writing"}))["folder"])
    (first / "rest").write_text("")
    second = Path((await host.told("snapshot", {"folder": "/x/.step-000002.a.writing"}))["folder"])
    assert second.is_dir() and not first.exists()


async def test_a_call_that_names_no_owner_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequest):
        await pair.agent.BringFolder(pb.BringFolderRequest(), None)


def test_ranks_are_numbered_along_the_hosts(pair: Pair) -> None:
    assert pair.plan.places == {"": range(1), "b": range(1, 3)}
    assert pair.there.ranks_here == range(1, 3)
    assert "GLOO_SOCKET_IFNAME" not in pair.plan.environment()
