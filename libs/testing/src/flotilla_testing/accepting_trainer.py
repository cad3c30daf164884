"""A trainer that accepts every update and trains nothing, over the real contract and the real weight group.

For benches and fault tests of everything around the trainer. Start it next to a stack whose
`trainer.replicas` is 0: it registers itself like any service. ACCEPTING_TRAINER_S in its environment is how long each
update and each snapshot takes. Invariants: versions, idempotency by update_id and epochs behave as the real trainer's
do, and an update continues when its caller goes away; the weights it publishes are a small tensor whose value is the
step, so digests change with versions.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from flotilla.common.v1 import operate_pb2, weights_pb2
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.registration_pb2 import SERVICE_KIND_TRAINER, Registration
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla.trainer.v1 import trainer_pb2_grpc
from flotilla_core.checkpoint import CheckpointShelf, Manifest, on_disk
from flotilla_core.errors import FailedPrecondition, NotFound, StaleVersion
from flotilla_core.kinds import EPISODES
from flotilla_core.model_folder import model_folder, tokenizer_digest
from flotilla_core.rpc import RpcServer
from flotilla_core.service import Host, run_service
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_weights.group import BACKENDS, Sender
from flotilla_weights.manifest import Manifest as WeightManifest

TENSOR = "accepting.weight"
ELEMENTS = 1024
Context = grpc.aio.ServicerContext[Any, Any]


class AcceptingTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Implements `flotilla_core.service.Service` and the calls that a run needs."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._run_id = ""
        self._version = Version(0, 0)
        self._updates: dict[str, asyncio.Task[pb.UpdateResult]] = {}
        self._takes_s = float(os.environ.get("ACCEPTING_TRAINER_S", "0"))
        self._sender: Sender | None = None
        self._connected: asyncio.Task[None] | None = None
        self._manifest: WeightManifest | None = None
        self._epoch = 0

    def add_to(self, server: RpcServer) -> None:
        """The trainer's contract."""
        server.add(
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server, self, "flotilla.trainer.v1.TrainerService"
        )

    async def start(self) -> None:
        """Nothing to load."""

    def describe(self, registration: Registration) -> None:
        """The stack's tokenizer and that it takes episodes, so that runs accept this trainer."""
        registration.tokenizer_digest = tokenizer_digest(model_folder(self._host.stack.model))
        registration.capacity[EPISODES] = 1

    async def check(self) -> list[Finding]:
        """Always fit."""
        return []

    async def dump_stacks(self) -> list[operate_pb2.ProcessStacks]:
        """No children."""
        return []

    async def drain(self, grace_s: float) -> None:
        """Nothing is ever under way for long."""

    async def stop(self) -> None:
        """Leave the weight group."""
        self._leave()

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        """Start at step 0; one run at a time."""
        if self._run_id:
            raise FailedPrecondition(f"run {self._run_id} holds the trainer")
        self._run_id = request.run_id
        self._version = Version(request.lineage, 0)
        self._updates.clear()
        return pb.OpenSessionResponse(policy_version=self._version.to_proto(), parameters=ELEMENTS, ranks=1)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        """Forget the run."""
        if request.run_id == self._run_id:
            self._run_id = ""
            self._leave()
        return pb.CloseSessionResponse()

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        """Return the version of the run that was opened last."""
        if request.run_id != self._run_id:
            raise FailedPrecondition(f"run {request.run_id} has no session")
        return pb.GetSessionResponse(
            policy_version=self._version.to_proto(), last_update_id=next(reversed(self._updates), "")
        )

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Context
    ) -> AsyncIterator[pb.SaveCheckpointResponse]:
        """A sealed folder that holds the version and nothing heavy."""
        await asyncio.sleep(self._takes_s)
        yield pb.SaveCheckpointResponse(snapshot=pb.CheckpointSnapshot())
        path = Path(request.path)
        shelf = CheckpointShelf(path.parent)
        try:
            manifest = await asyncio.to_thread(on_disk, path, self._written, shelf, path.name, request)
        finally:
            shelf.discard(path.name)
        yield pb.SaveCheckpointResponse(
            durable=pb.CheckpointDurable(path=request.path, bytes=manifest.nbytes)
        )

    def _written(self, shelf: CheckpointShelf, name: str, request: pb.SaveCheckpointRequest) -> Manifest:
        folder = shelf.begin(name)
        (folder / "trainer.json").write_text(json.dumps({"policy_version": list(self._version)}), "utf-8")
        (folder / "coordinator.json").write_bytes(request.coordinator_state)
        manifest = Manifest.seal(folder)
        shelf.publish(name)
        return manifest

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: Context
    ) -> pb.LoadCheckpointResponse:
        """Go on at the step of the checkpoint."""
        folder = Path(request.path)
        await asyncio.to_thread(Manifest.verified, folder)
        _, step = json.loads((folder / "trainer.json").read_text("utf-8"))["policy_version"]
        self._version = Version(self._version.lineage, step)
        return pb.LoadCheckpointResponse(
            policy_version=self._version.to_proto(),
            coordinator_state=(folder / "coordinator.json").read_bytes(),
        )

    async def Train(self, requests: AsyncIterator[pb.TrainRequest], context: Context) -> pb.TrainResponse:
        """Take the whole stream, count its tokens, move one step on."""
        header, tokens, sample_ids = pb.TrainHeader(), 0, []
        async for request in requests:
            if request.HasField("header"):
                header = request.header
                continue
            for group in request.chunk.groups:
                for sample in group.samples:
                    tokens += len(from_tensor(sample.token_ids))
                    sample_ids.append(sample.sample_id)
        if header.update_id not in self._updates:
            if Version.from_proto(header.policy_version) != self._version:
                raise StaleVersion(f"the trainer is at {self._version}", where=header.update_id)
            making = self._made(header, tokens, sample_ids)
            self._updates[header.update_id] = asyncio.create_task(making, name=header.update_id)
        return pb.TrainResponse(result=await asyncio.shield(self._updates[header.update_id]))

    async def _made(self, header: pb.TrainHeader, tokens: int, sample_ids: list[str]) -> pb.UpdateResult:
        await asyncio.sleep(self._takes_s)
        self._version = Version(self._version.lineage, self._version.step + 1)
        return pb.UpdateResult(
            update_id=header.update_id,
            policy_version=self._version.to_proto(),
            metrics={
                "loss": 0.0,
                "tokens/trained": float(tokens),
                "learning_rate": header.learning_rate.peak,
            },
            sample_ids=sample_ids,
        )

    async def GetUpdate(self, request: pb.GetUpdateRequest, context: Context) -> pb.GetUpdateResponse:
        """Return the answer of Train."""
        if request.update_id not in self._updates:
            raise NotFound("no such update", where=request.update_id)
        return pb.GetUpdateResponse(result=await asyncio.shield(self._updates[request.update_id]))

    async def ComputeLogprobs(
        self, request: pb.ComputeLogprobsRequest, context: Context
    ) -> pb.ComputeLogprobsResponse:
        """Zero for every token: there is no model."""
        return pb.ComputeLogprobsResponse(
            policy_version=self._version.to_proto(),
            sequences=[
                pb.SequenceLogprobs(
                    sequence_id=sequence.sequence_id,
                    logprobs=to_tensor(np.zeros(len(from_tensor(sequence.token_ids)), dtype=np.float32)),
                )
                for sequence in request.sequences
            ],
        )

    async def EvaluateLoss(
        self, request: pb.EvaluateLossRequest, context: Context
    ) -> pb.EvaluateLossResponse:
        """No answer is ahead of another one."""
        return pb.EvaluateLossResponse(
            policy_version=self._version.to_proto(), metrics={"loss": 0.0, "preference/accuracy": 0.5}
        )

    async def OpenWeightGroup(
        self, request: pb.OpenWeightGroupRequest, context: Context
    ) -> pb.OpenWeightGroupResponse:
        """Listen, and let the members come."""
        self._leave()
        self._manifest = WeightManifest.from_named(
            [(TENSOR, torch.float32, (ELEMENTS,))], request.bucket_bytes
        )
        backend = BACKENDS[request.backend]
        self._epoch = request.epoch
        self._sender = Sender.listen(
            "127.0.0.1", request.epoch, request.world_size, backend, request.timeout.ToNanoseconds() / 1e9
        )
        self._connected = asyncio.create_task(asyncio.to_thread(self._sender.connect, self._manifest))
        group = weights_pb2.WeightGroup(
            run_id=request.run_id,
            epoch=request.epoch,
            backend=request.backend,
            host=self._sender.host,
            port=self._sender.port,
            world_size=request.world_size,
            sender_ranks=[0],
            timeout=request.timeout,
            secret=self._sender.secret,
        )
        return pb.OpenWeightGroupResponse(group=group, manifest=self._manifest.to_proto())

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: Context
    ) -> pb.PublishWeightsResponse:
        """Send a tensor full of the step's number."""
        if self._sender is None or self._connected is None or self._manifest is None:
            raise FailedPrecondition("no weight group is open")
        await self._connected
        tensor = torch.full((ELEMENTS,), float(self._version.step))
        digests = await asyncio.to_thread(self._sender.publish, self._manifest, [(TENSOR, tensor)])
        return pb.PublishWeightsResponse(
            digests=weights_pb2.WeightDigests(
                version=request.policy_version,
                manifest_digest=self._manifest.digest,
                tensor_digests=digests,
            ),
            bytes=ELEMENTS * 4,
        )

    async def CloseWeightGroup(
        self, request: pb.CloseWeightGroupRequest, context: Context
    ) -> pb.CloseWeightGroupResponse:
        """Give the epoch up."""
        if request.epoch == self._epoch:
            self._leave()
        return pb.CloseWeightGroupResponse()

    def _leave(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.abort()


if __name__ == "__main__":
    sys.exit(run_service(SERVICE_KIND_TRAINER, AcceptingTrainer))
