"""Serve TrainerService: check requests, read the messages of an update, find the session and answer.

Invariants: a mutating call that is repeated acts once; every refusal is a typed error; a group that came in pieces is
joined again; nothing in here waits for a rank except through the gang, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer
from flotilla_core import ids
from flotilla_core.errors import Cancelled, FailedPrecondition, InvalidRequest
from flotilla_core.version import Version
from flotilla_trainer.front.idempotent_calls import IdempotentCalls
from flotilla_trainer.front.session_manager import SessionManager

KEPT_REPLIES = 256
EXPORTED = ("float32", "bfloat16")
"""Types of exported weights, by torch's names."""

T = TypeVar("T")


class TrainerServicer(TrainerServiceServicer):
    """Answers the calls of TrainerService."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._replies: IdempotentCalls[Any] = IdempotentCalls(KEPT_REPLIES)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        return await self._idempotent("open", request, lambda: self._manager.open(request))

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        await self._manager.close(request.run_id)
        return pb.CloseSessionResponse()

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        session = self._manager.session(request.run_id)
        return pb.GetSessionResponse(
            policy_version=session.version.to_proto(),
            last_update_id=session.last_update_id,
            max_sequence_tokens=session.ranks.limits.max_sequence_tokens,
            vocabulary=session.ranks.limits.vocabulary,
        )

    async def Train(self, requests: AsyncIterator[pb.TrainRequest], context: Any) -> pb.TrainResponse:
        header = await read_header(requests)
        session = self._manager.learner(header.run_id)
        if (done := session.updates.finished(header.update_id)) is not None:
            return pb.TrainResponse(result=done)
        session.check_version(Version.from_proto(header.policy_version), f"update {header.update_id}")
        groups = await read_groups(requests)
        if len(groups) != header.groups:
            raise InvalidRequest(
                f"the stream held {len(groups)} groups, its header announced {header.groups}",
                where=f"update {header.update_id}",
            )
        return pb.TrainResponse(result=await session.updates.train(header, groups))

    async def GetUpdate(self, request: pb.GetUpdateRequest, context: Any) -> pb.GetUpdateResponse:
        session = self._manager.learner(request.run_id)
        return pb.GetUpdateResponse(result=await session.updates.result(request.update_id))

    async def ComputeLogprobs(
        self, request: pb.ComputeLogprobsRequest, context: Any
    ) -> pb.ComputeLogprobsResponse:
        return await self._manager.session(request.run_id).logprobs(request)

    async def ComputeValues(self, request: pb.ComputeValuesRequest, context: Any) -> pb.ComputeValuesResponse:
        return await self._manager.session(request.run_id).values(request)

    async def EvaluateLoss(self, request: pb.EvaluateLossRequest, context: Any) -> pb.EvaluateLossResponse:
        return await self._manager.learner(request.run_id).evaluate(request.groups)

    async def ForwardBackward(
        self, request: pb.ForwardBackwardRequest, context: Any
    ) -> pb.ForwardBackwardResponse:
        return await self._manager.learner(request.run_id).gradients.add(request)

    async def OptimStep(self, request: pb.OptimStepRequest, context: Any) -> pb.OptimStepResponse:
        session = self._manager.learner(request.run_id)
        return await self._idempotent("step", request, lambda: session.gradients.step(request))

    async def OpenWeightGroup(
        self, request: pb.OpenWeightGroupRequest, context: Any
    ) -> pb.OpenWeightGroupResponse:
        self._manager.policy(request.run_id)
        return await self._idempotent("open group", request, lambda: self._manager.weights.open(request))

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: Any
    ) -> pb.PublishWeightsResponse:
        session = self._manager.policy(request.run_id)

        async def publish() -> pb.PublishWeightsResponse:
            async with session.holding(Version.from_proto(request.policy_version), "the publication"):
                return await self._manager.weights.publish(request)

        return await self._idempotent("publish", request, publish)

    async def CloseWeightGroup(
        self, request: pb.CloseWeightGroupRequest, context: Any
    ) -> pb.CloseWeightGroupResponse:
        await self._manager.weights.close(request.epoch)
        return pb.CloseWeightGroupResponse()

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Any
    ) -> AsyncIterator[pb.SaveCheckpointResponse]:
        session = self._manager.learner(request.run_id)
        save = await self._idempotent(
            "save", request, lambda: self._manager.checkpoints.begin(session, request)
        )
        snapshot = pb.CheckpointSnapshot()
        snapshot.stall.FromNanoseconds(int(save.stall_s * 1e9))
        yield pb.SaveCheckpointResponse(snapshot=snapshot)
        # The writer outlives this call.
        await asyncio.wait({save.durable})
        if save.durable.cancelled():
            raise Cancelled(f"the checkpoint was cancelled: the session of run {request.run_id} has ended")
        yield pb.SaveCheckpointResponse(durable=save.durable.result())

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: Any
    ) -> pb.LoadCheckpointResponse:
        session = self._manager.learner(request.run_id)
        return await self._idempotent(
            "load", request, lambda: self._manager.checkpoints.load(session, request)
        )

    async def ExportModel(self, request: pb.ExportModelRequest, context: Any) -> pb.ExportModelResponse:
        session = self._manager.learner(request.run_id)
        _check_export_path(request.path)
        if request.dtype not in ("", *EXPORTED):
            raise InvalidRequest(
                f"weights are not exported as {request.dtype!r:.80}",
                where="dtype",
                next_step=f"name one of {', '.join(EXPORTED)}, or none for the type that the trainer computes in",
            )

        async def export() -> pb.ExportModelResponse:
            async with session.holding(Version.from_proto(request.policy_version), "the export"):
                return await self._manager.export(request)

        return await self._idempotent("export", request, export)

    async def _idempotent(self, kind: str, request: Any, act: Callable[[], Awaitable[T]]) -> T:
        reply: T = await self._replies.run(f"{kind} {request.request_id or ids.new_request_id()}", act)
        return reply


def _check_export_path(path: str) -> None:
    """Refuse a path that is no place for a model: an export replaces the model that is there, and nothing else."""
    folder = Path(path)
    if not folder.is_absolute():
        raise InvalidRequest("the path is not absolute", where=f"path {path!r}")
    if not folder.name or ".." in folder.parts:
        raise InvalidRequest("the path names no folder for a model", where=f"path {path!r}")
    if folder.exists() and not (folder / "config.json").is_file():
        raise FailedPrecondition(
            "the export would replace what is no model",
            where=f"path {path}",
            why="it exists, and there is no config.json in it",
            next_step="name a folder that does not exist yet, or one that holds a model",
        )


async def read_header(requests: AsyncIterator[pb.TrainRequest]) -> pb.TrainHeader:
    """Read the first message of an update."""
    async for request in requests:
        if request.WhichOneof("part") == "header" and request.header.update_id:
            return request.header
        break
    raise InvalidRequest("an update starts with a header that names it", where="Train")


async def read_groups(requests: AsyncIterator[pb.TrainRequest]) -> list[pb.TrainGroup]:
    """Read the groups of an update, each joined from its pieces."""
    groups: list[pb.TrainGroup] = []
    async for request in requests:
        if request.WhichOneof("part") != "chunk":
            raise InvalidRequest("after the header come chunks of groups", where="Train")
        for group in request.chunk.groups:
            continues = bool(groups and group.group_id) and group.group_id == groups[-1].group_id
            if continues and not group.prompt_token_ids.data:
                groups[-1].samples.MergeFrom(group.samples)
            else:
                groups.append(group)
    return groups
