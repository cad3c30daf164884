"""Trainers with real ranks behind real gRPC, without a fleet around them.

The gangs of one, two and three ranks boot once and are shared by all tests of this folder, each of which opens sessions
of its own; what needs another configuration starts a gang for itself.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import weights_pb2
from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla.trainer.v1.trainer_pb2_grpc import (
    TrainerServiceStub,
)
from flotilla_core import rpc
from flotilla_core.config import BatchingConfig, StackConfig
from flotilla_core.errors import FlotillaError
from flotilla_core.roles import NAMED
from flotilla_core.service import Activities
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.credentials import credential
from flotilla_testing.files import files_in
from flotilla_testing.servers import serving
from flotilla_testing.session_specs import as_struct, called, wire_objective
from flotilla_testing.tiny_qwen3 import VOCABULARY, tiny_qwen3
from flotilla_trainer.front.servicer import TrainerServicer
from flotilla_trainer.front.session_files import SessionFiles
from flotilla_trainer.front.session_manager import SessionManager
from flotilla_trainer.gang.fork_server import RankForkServer
from flotilla_trainer.gang.hosts import GangHosts
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.ranks import Gang

CALL_TIMEOUT_S = 60.0
Asked = str | session_pb2.Objective


def make_model(folder: Path, seed: int, **changes: Any) -> Path:
    """A two-layer Qwen3 with weights large enough to make every term matter."""
    shape = {"intermediate_size": 64, "initializer_range": 0.3, "tie_word_embeddings": True}
    tiny_qwen3(seed, **shape | changes).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", "utf-8")
    return folder


@dataclass
class Trainer:
    """The front, its gang and a client."""

    plan: GangPlan
    gang: Gang
    manager: SessionManager
    activities: Activities
    stub: Any
    model: Path
    lost: list[FlotillaError]
    runs: int = 0

    @property
    def run_id(self) -> str:
        return f"run-{self.runs}"

    async def call(self, method: str, request: Any) -> Any:
        return await rpc.unary(getattr(self.stub, method), request, timeout_s=CALL_TIMEOUT_S, attempts=1)

    async def open(
        self, objective: Asked = "grpo", *, lineage: int = 0, **changes: Any
    ) -> pb.OpenSessionResponse:
        """A new session of a new run, in place of the last one."""
        await self.call("CloseSession", pb.CloseSessionRequest(run_id=self.run_id))
        self.runs += 1
        request = pb.OpenSessionRequest(
            run_id=self.run_id, spec=session_spec(objective, **changes), lineage=lineage
        )
        return await self.call("OpenSession", request)

    async def train(
        self, step: int, groups: list[pb.TrainGroup], announced: int | None = None, *, lineage: int = 0
    ) -> pb.UpdateResult:
        """One update from version (lineage, step), a chunk a group."""

        async def stream() -> AsyncIterator[pb.TrainRequest]:
            version = Version(lineage, step)
            yield pb.TrainRequest(
                header=pb.TrainHeader(
                    run_id=self.run_id,
                    update_id=f"{self.run_id}/{version}",
                    policy_version=version.to_proto(),
                    groups=len(groups) if announced is None else announced,
                )
            )
            for group in groups:
                yield pb.TrainRequest(chunk=pb.TrainChunk(groups=[group]))

        reply = await rpc.client_stream(self.stub.Train, stream(), timeout_s=CALL_TIMEOUT_S)
        return reply.result

    async def gradient(self, groups: list[pb.TrainGroup]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Metrics and the whole gradient of a batch, through the path that Train takes; no step follows."""
        session = self.manager.session(self.run_id)
        prepared = await session.updates.preparation.of(
            "gradients", groups, session.version, session.updates.progress.objective
        )
        answers = await session.ranks.work("gradients", prepared.packed, {})
        metrics = answers[0].fields["metrics"] | prepared.facts
        return metrics, {name: array.copy() for name, array in answers[0].arrays.items()}

    @staticmethod
    def scored(groups: list[pb.TrainGroup]) -> list[pb.ScoredSequence]:
        """Return the samples as sequences to score."""
        return [
            pb.ScoredSequence(
                sequence_id=sample.sample_id,
                prompt_token_ids=group.prompt_token_ids,
                token_ids=sample.token_ids,
            )
            for group in groups
            for sample in group.samples
        ]

    async def logprobs(self, groups: list[pb.TrainGroup], **asked: Any) -> pb.ComputeLogprobsResponse:
        sequences = self.scored(groups)
        request = pb.ComputeLogprobsRequest(run_id=self.run_id, sequences=sequences, **asked)
        return await self.call("ComputeLogprobs", request)

    async def judged(self, groups: list[pb.TrainGroup]) -> dict[str, float]:
        """The metrics of a batch that is not trained on."""
        request = pb.EvaluateLossRequest(run_id=self.run_id, groups=groups)
        return dict((await self.call("EvaluateLoss", request)).metrics)

    def saving(self, folder: Path, version: Version, **fields: Any) -> Any:
        """The stages of a save, as they come."""
        request = pb.SaveCheckpointRequest(
            run_id=self.run_id, path=str(folder), policy_version=version.to_proto(), **fields
        )
        return aclosing(rpc.server_stream(self.stub.SaveCheckpoint, request, idle_timeout_s=CALL_TIMEOUT_S))

    async def save(self, folder: Path, version: Version, **fields: Any) -> pb.CheckpointDurable:
        """Save a checkpoint through both stages and return the last one."""
        async with self.saving(folder, version, **fields) as stages:
            found = [stage.WhichOneof("stage") async for stage in stages if (last := stage)]
        assert found == ["snapshot", "durable"]
        return last.durable

    async def load(self, folder: Path, **anew: bool) -> pb.LoadCheckpointResponse:
        request = pb.LoadCheckpointRequest(run_id=self.run_id, path=str(folder), **anew)
        return await self.call("LoadCheckpoint", request)

    async def open_group(
        self,
        epoch: int,
        timeout_s: int = int(CALL_TIMEOUT_S),
        backend: weights_pb2.WeightBackend.ValueType = weights_pb2.WEIGHT_BACKEND_GLOO,
    ) -> pb.OpenWeightGroupResponse:
        """A weight group of the trainer and one receiver."""
        request = pb.OpenWeightGroupRequest(
            run_id=self.run_id,
            epoch=epoch,
            backend=backend,
            world_size=2,
            bucket_bytes=4096,
            timeout=Duration(seconds=timeout_s),
        )
        return await self.call("OpenWeightGroup", request)

    async def publish(self, epoch: int, step: int) -> pb.PublishWeightsResponse:
        version = Version(0, step).to_proto()
        request = pb.PublishWeightsRequest(run_id=self.run_id, epoch=epoch, policy_version=version)
        return await self.call("PublishWeights", request)

    async def export(self, path: Path, step: int, dtype: str = "") -> Path:
        version = Version(0, step).to_proto()
        request = pb.ExportModelRequest(
            run_id=self.run_id, path=str(path), policy_version=version, dtype=dtype
        )
        await self.call("ExportModel", request)
        return path


def policy_objective(**changes: Any) -> session_pb2.Objective:
    """GRPO with an asymmetric clip, and changes by key; rollouts may be as far away as they like."""
    correction = {"fail_at": None} | changes.pop("correction", {})
    section = {"loss": {"type": "ppo", "clip_high": 0.28}, "correction": correction, **changes}
    written = {key: value for key, value in section.items() if value is not None}
    return wire_objective("policy", written, temperature=0.7, max_response_tokens=20)


def session_spec(objective: Asked, **changes: Any) -> session_pb2.SessionSpec:
    """GRPO, SFT, a critic's or another objective, with changes by key, wherever the key is."""
    optimizer = {"learning_rate": 1e-2, "schedule": "constant", "max_skipped_updates": 2}
    batching = {"tokens_per_microbatch": 4096, "logprob_chunk_tokens": 2048}
    spec = session_pb2.SessionSpec(role=session_pb2.ROLE_POLICY, seed=7, total_updates=10)
    if isinstance(objective, session_pb2.Objective):
        spec.objective.CopyFrom(objective)
    else:
        spec.objective.CopyFrom(wire_objective("sft", {}) if objective == "sft" else policy_objective())
    if spec.objective.kind == "value":
        spec.role = session_pb2.ROLE_CRITIC
    for name, value in changes.items():
        if name == "lora":
            spec.lora.CopyFrom(as_struct(value))
        elif name in spec.DESCRIPTOR.fields_by_name:
            setattr(spec, name, value)
        else:
            owner = batching if name in BatchingConfig.model_fields else optimizer
            owner[name] = value
    spec.optimizer.CopyFrom(as_struct(optimizer))
    spec.batching.CopyFrom(as_struct(batching))
    return spec


def make_groups(sizes: list[int], seed: int = 0) -> list[pb.TrainGroup]:
    """Groups of unequal size, prompts and responses of unequal length, one response masked in part."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, rng.integers(low, high)).astype(np.int32)

    groups = []
    for index, size in enumerate(sizes):
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(ids(1, 9)))
        for number in range(size):
            response = ids(1, 20)
            group.samples.add(
                sample_id=f"g{index}/{number}",
                token_ids=to_tensor(response),
                logprobs=to_tensor(rng.normal(-3.0, 0.7, len(response)).astype(np.float32)),
                reward=float(rng.normal()),
            )
        groups.append(group)
    first = groups[0].samples[0]
    first.mask.CopyFrom(to_tensor(np.arange(len(first.token_ids.data) // 4) % 2 == 0))
    return groups


def overflowing(groups: list[pb.TrainGroup]) -> list[pb.TrainGroup]:
    """Give `groups` finite numbers whose products, and with them loss and gradient, are infinite in float32."""
    for group in groups:
        for sample in group.samples:
            tokens = len(sample.token_ids.data) // 4
            sample.logprobs.CopyFrom(to_tensor(np.full(tokens, -1e4, np.float32)))
            sample.advantages.CopyFrom(to_tensor(np.full(tokens, -1e37, np.float32)))
    return groups


@asynccontextmanager
async def running_trainer(
    model: Path, logs: Path, fork_server: RankForkServer, *, name: str = "trainer", **gang_config: Any
) -> AsyncIterator[Trainer]:
    """Run the gang with this name: that of the policy or of another role."""
    kind, _, own = name.partition("-")
    sections = {NAMED[kind]: {own: {"model": model, **gang_config}}} if own else {name: gang_config}
    stack = StackConfig.model_validate({"model": model, **sections})
    plan = GangPlan.of_stack(stack, name, f"{name}-test", model, logs)
    lost: list[FlotillaError] = []

    def on_lost(error: FlotillaError) -> None:
        lost.append(error)
        manager.gang_lost(error)

    activities = Activities()
    gang = Gang(plan, fork_server, lost=on_lost, beyond_help=lost.append)
    files = SessionFiles(files_in(logs), logs / "remote-runs", GangHosts(plan, fork_server).bring)
    manager = SessionManager(gang, plan, stack, activities, files)
    trusted = credential(logs)
    async with AsyncExitStack() as stack_of_exits:
        server = serving(TrainerServicer(manager), credential=trusted)
        address = await stack_of_exits.enter_async_context(server)
        stack_of_exits.push_async_callback(gang.stop)
        await gang.start()
        channel = rpc.connect(address, credential=trusted)
        stack_of_exits.push_async_callback(channel.close)
        yield Trainer(plan, gang, manager, activities, TrainerServiceStub(channel), model, lost)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankForkServer]:
    """The fork server of all gangs; its imports are the same for all of them."""
    shared = RankForkServer(dict(os.environ), tmp_path_factory.mktemp("fork-server") / "fork-server.log")
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def start_trainer(
    tmp_path_factory: pytest.TempPathFactory, fork_server: RankForkServer
) -> Callable[..., Any]:
    """Starts trainers with chosen configuration."""

    def start(
        seed: int = 1,
        *,
        own_fork_server: RankForkServer | None = None,
        model: Path | None = None,
        **gang_config: Any,
    ) -> Any:
        model = model or make_model(tmp_path_factory.mktemp("model"), seed)
        logs = tmp_path_factory.mktemp("logs")
        return running_trainer(model, logs, own_fork_server or fork_server, **gang_config)

    return start


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_rank(start_trainer: Callable[..., Any]) -> AsyncIterator[Trainer]:
    async with start_trainer(nproc=1) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def two_ranks(start_trainer: Callable[..., Any]) -> AsyncIterator[Trainer]:
    async with start_trainer(nproc=2) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def three_ranks(start_trainer: Callable[..., Any]) -> AsyncIterator[Trainer]:
    async with start_trainer(nproc=3) as started:
        yield started


@pytest.fixture(params=["one_rank", "two_ranks"], ids=["1-rank", "2-ranks"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    shared: Trainer = request.getfixturevalue(request.param)
    return shared


@pytest.fixture(scope="session")
def groups_of() -> Callable[..., list[pb.TrainGroup]]:
    return make_groups


@pytest.fixture(scope="session")
def wild_groups_of() -> Callable[..., list[pb.TrainGroup]]:
    return lambda *arguments: overflowing(make_groups(*arguments))


@pytest.fixture(scope="session")
def model_maker() -> Callable[..., Path]:
    return make_model


@pytest.fixture(scope="session")
def policy_of() -> Callable[..., session_pb2.Objective]:
    return policy_objective


@pytest.fixture(scope="session")
def function_of() -> Callable[..., session_pb2.Function]:
    return called
