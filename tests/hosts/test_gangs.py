"""A gang whose ranks sit on two hosts that share no folder: it computes what one host computes, and is lost alone.

How the hosts are made is in `separate.py`. The agent of the second host is started by hand, as on any further host.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from accounts import assert_accounted_for
from hosts.separate import READY_S, Hosts, run_file, separate_hosts

from flotilla.common.v1 import operate_pb2, operate_pb2_grpc
from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceStub
from flotilla_core import rpc
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import as_struct, wire_objective
from flotilla_testing.stack import wait_until
from flotilla_testing.tcp_proxy import TcpProxy

pytestmark = pytest.mark.timeout(600)

AGENT = "trainer-at-b"
RANK_TIMEOUT_S = 6.0
WAITS = "waits for its agents"
CALL_S = 120.0
PLACES = {
    "nproc": 2,
    "rank_timeout_s": RANK_TIMEOUT_S,
    "hosts": [{"name": "a", "ranks": 1}, {"name": "b", "ranks": 1}],
}
WORDS = 16


@pytest.fixture
def hosts(arithmetic: Path, tmp_path: Path) -> Iterator[Hosts]:
    names = ("generator-0", "trainer", AGENT, "reward-0", "alone")
    with separate_hosts(arithmetic, tmp_path, names, trainer=PLACES) as made:
        yield made


class Front:
    """The calls of a coordinator to one trainer."""

    def __init__(self, hosts: Hosts, name: str, host: str) -> None:
        self._home = hosts.home(host)
        address = hosts.address(name, host)
        self._channel = rpc.connect(address, credential=hosts.stack.credential)
        self._stub: Any = TrainerServiceStub(self._channel)
        self._operate: Any = operate_pb2_grpc.OperateServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def call(self, method: str, request: Any) -> Any:
        return await rpc.unary(getattr(self._stub, method), request, timeout_s=CALL_S, attempts=1)

    async def open(self) -> None:
        section = {"loss": {"type": "ppo"}, "correction": {"fail_at": None}}
        spec = session_pb2.SessionSpec(
            role=session_pb2.ROLE_POLICY,
            seed=7,
            total_updates=10,
            objective=wire_objective("policy", section),
            optimizer=as_struct({"learning_rate": 1e-2, "schedule": "constant"}),
            batching=as_struct({"tokens_per_microbatch": 256, "logprob_chunk_tokens": 256}),
        )
        await self.call("OpenSession", pb.OpenSessionRequest(run_id="run", spec=spec))

    async def train(self, step: int, attempt: int = 1) -> dict[str, float]:
        """One update from this step; its metrics but for times. An attempt is trained once."""

        async def stream() -> AsyncIterator[pb.TrainRequest]:
            version, groups = Version(0, step), groups_of(step)
            yield pb.TrainRequest(
                header=pb.TrainHeader(
                    run_id="run",
                    update_id=f"run/{version}/{attempt}",
                    policy_version=version.to_proto(),
                    groups=len(groups),
                )
            )
            yield pb.TrainRequest(chunk=pb.TrainChunk(groups=groups))

        reply = await rpc.client_stream(self._stub.Train, stream(), timeout_s=CALL_S)
        assert not reply.result.skipped
        return {name: value for name, value in reply.result.metrics.items() if not name.startswith("time/")}

    async def logprobs(self) -> bytes:
        sequences = [
            pb.ScoredSequence(
                sequence_id=sample.sample_id,
                prompt_token_ids=group.prompt_token_ids,
                token_ids=sample.token_ids,
            )
            for group in groups_of(0)
            for sample in group.samples
        ]
        reply = await self.call(
            "ComputeLogprobs", pb.ComputeLogprobsRequest(run_id="run", sequences=sequences)
        )
        return b"".join(one.logprobs.data for one in reply.sequences)

    async def save(self, step: int) -> Path:
        path = self._home / "run" / "checkpoints" / CheckpointShelf.name_of(step)
        request = pb.SaveCheckpointRequest(
            run_id="run", path=str(path), policy_version=Version(0, step).to_proto()
        )
        stream = rpc.server_stream(self._stub.SaveCheckpoint, request, idle_timeout_s=CALL_S)
        async with aclosing(stream) as stages:
            assert [stage.WhichOneof("stage") async for stage in stages] == ["snapshot", "durable"]
        return path

    async def load(self, path: Path) -> None:
        await self.call("LoadCheckpoint", pb.LoadCheckpointRequest(run_id="run", path=str(path)))

    async def exported(self, step: int) -> bytes:
        path = self._home / "run" / "model"
        version = Version(0, step).to_proto()
        await self.call(
            "ExportModel", pb.ExportModelRequest(run_id="run", path=str(path), policy_version=version)
        )
        return (path / "model.safetensors").read_bytes()

    async def processes(self) -> dict[str, str]:
        """The stacks of the front and its ranks, by process."""
        request = operate_pb2.DumpStacksRequest()
        reply = await rpc.unary(self._operate.DumpStacks, request, timeout_s=CALL_S)
        return {one.process: one.text for one in reply.processes}


def groups_of(step: int) -> list[pb.TrainGroup]:
    """Groups of made-up samples, others for each step."""
    rng = np.random.default_rng(step)

    def ids(count: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, WORDS, count).astype(np.int32)

    groups = []
    for index in range(3):
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(ids(4)))
        for number in range(4):
            tokens = ids(int(rng.integers(1, 12)))
            group.samples.add(
                sample_id=f"g{index}/{number}",
                token_ids=to_tensor(tokens),
                logprobs=to_tensor(rng.normal(-3.0, 0.7, len(tokens)).astype(np.float32)),
                reward=float(rng.normal()),
            )
        groups.append(group)
    return groups


async def learned(front: Front) -> dict[str, Any]:
    """What a gang knows after two updates, and after a third one that is made twice, from a checkpoint too."""
    await front.open()
    metrics = [await front.train(0), await front.train(1)]
    saved = await front.save(2)
    metrics.append(await front.train(2))
    third, model = await front.logprobs(), await front.exported(3)
    await front.load(saved)
    metrics.append(await front.train(2, attempt=2))
    assert await front.logprobs() == third, "the checkpoint is the state that was saved"
    Manifest.verified(saved)
    shards = sorted(path.name for path in (saved / "shards").iterdir())
    return {"metrics": metrics, "logprobs": third, "model": model, "shards": shards}


def test_two_hosts_compute_what_one_computes_and_resume_what_they_saved(hosts: Hosts) -> None:
    hosts.start(AGENT, "ranks", bind={"host": "127.0.0.2"})
    hosts.start("trainer", "trainer")
    hosts.start("trainer-1", "trainer", "alone", trainer={"hosts": []})
    hosts.wait_ready(AGENT, "trainer", "trainer-1")

    async def both() -> list[dict[str, Any]]:
        fronts = [Front(hosts, "trainer", "trainer"), Front(hosts, "trainer-1", "alone")]
        try:
            found = [await learned(front) for front in fronts]
            processes = await fronts[0].processes()
        finally:
            for front in fronts:
                await front.close()
        assert set(processes) >= {"main", "rank 0", "rank 1 on b"}
        assert all("most recent call first" in processes[one] for one in ("rank 0", "rank 1 on b"))
        return found

    spread, alone = asyncio.run(both())
    assert spread == alone
    assert len(spread["shards"]) == 2
    # Each host has the log of its own rank, and the second one its part of the checkpoint.
    assert not (hosts.state("trainer") / "logs" / "trainer.rank-1.log").exists()
    assert (hosts.state(AGENT) / "logs" / "trainer.rank-1.log").exists()
    assert [*(hosts.state(AGENT) / "rank-parts" / AGENT).glob("*/shards/*")]


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def kill_agent(hosts: Hosts, start: Callable[[], None]) -> None:
    hosts.kill(AGENT)
    start()


def kill_remote_rank(hosts: Hosts, start: Callable[[], None]) -> None:
    (rank,) = (
        one
        for one in psutil.Process(hosts.pid(AGENT)).children(recursive=True)
        if one.name().startswith("rank-1")
    )
    os.kill(rank.pid, signal.SIGKILL)


def test_what_happens_to_an_agent_costs_the_gang_alone_and_the_run_goes_on(hosts: Hosts) -> None:
    port = free_port("127.0.0.3")
    with TcpProxy(("127.0.0.2", port), ("127.0.0.3", port)) as link:

        def start_agent() -> None:
            bind = {"host": "127.0.0.3", "advertise_host": "127.0.0.2"}
            hosts.start(AGENT, "ranks", port=port, bind=bind)

        start_agent()
        for name, kind in (("generator-0", "generator"), ("trainer", "trainer"), ("reward-0", "reward")):
            hosts.start(name, kind)
        hosts.wait_ready(AGENT, "generator-0", "trainer", "reward-0")
        file = run_file(hosts.home("coordinator"))
        run = hosts.stack.ok("run", "start", str(file), "steps=1000")
        shelf = CheckpointShelf(Path(run["directory"]) / "checkpoints")
        wait_until("two checkpoints beside the coordinator", lambda: len(shelf.names()) >= 2, READY_S)

        def cut_stream(hosts: Hosts, start: Callable[[], None]) -> None:
            link.cut()
            log = hosts.log("trainer")
            wait_until(
                "the front to miss the agent",
                lambda: "waits for its agents" in hosts.log("trainer")[len(log) :],
                READY_S,
            )
            link.heal()

        for lineage, fault in enumerate((kill_remote_rank, kill_agent, cut_stream), start=1):
            fault(hosts, start_agent)
            wait_for_lineage(hosts, run, lineage, fault.__name__)
        with hosts.stack.client() as client:
            client.set_run(run["run_id"], [f"steps={client.get_run(run['run_id']).step + 2}"])
        wait_until("the end of the run", lambda: hosts.stack.state(run) != "running", READY_S)
    assert hosts.stack.state(run) == "succeeded"
    assert_accounted_for(hosts.stack, run["run_id"])
    for name in shelf.names():
        Manifest.verified(shelf.folder(name))
        assert len([*(shelf.folder(name) / "shards").iterdir()]) == 2
    told = hosts.log("trainer")
    assert "host b" in told and "was lost with its agent" in told
    assert (Path(run["directory"]) / "model" / "model.safetensors").stat().st_size > 0


def wait_for_lineage(hosts: Hosts, run: dict[str, Any], lineage: int, fault: str) -> None:
    """Wait until a step was made after a fault, from a checkpoint."""

    def made() -> bool:
        return any(step["lineage"] >= lineage for step in hosts.stack.metrics(run))

    wait_until(f"steps after {fault}", made, READY_S)
