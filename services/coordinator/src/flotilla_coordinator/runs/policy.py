"""The policy trainer as the loop sees it.

Invariants: `version` is the trainer's own answer, never a guess; one batch is one `update_id` for ever (a
skipped update moves no version, but the next batch is another update), so a stream that broke is answered by
GetUpdate, or sent again, and never trained twice; a trainer is taken back only from runs that have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flotilla.common.v1 import version_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.runs.batch import Batch, RolloutGroup
from flotilla_coordinator.runs.session_spec import session_spec
from flotilla_core import ids, rpc, telemetry
from flotilla_core.config import RunConfig
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from flotilla_core.telemetry import names
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version

if TYPE_CHECKING:
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub


CHUNK_BYTES = 2 << 20
MAX_LINKS = 128
TRAIN_TIMEOUT_S = 3600.0
SESSION_TIMEOUT_S = 300.0
CLOSE_SLACK_S = 30.0
"""For what a trainer still gives up once the last command of a session is through."""
TRAIN_ATTEMPTS = 3
SAVE_TIMEOUT_S = 3600.0
PROBE_TIMEOUT_S = 10.0
LOST_PROBES = 5
PROBE_EVERY_S = 0.5


class PolicyTrainer:
    """One session of one run on one trainer."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        stub: TrainerServiceAsyncStub,
        instance_id: str,
        dump_dir: Path,
        ended_runs: Callable[[], Awaitable[list[str]]],
        longest_command_s: float,
        lineage: int = 0,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._dump_dir = dump_dir
        self._ended_runs = ended_runs
        # A session is closed when its last command is through, and the next one opens after that.
        self._close_timeout_s = longest_command_s + CLOSE_SLACK_S
        self.stub = stub
        self.instance_id = instance_id
        self.version = Version(lineage, 0)
        self.opened = False
        """Whether the trainer has a session of this run, as far as is known here."""

    async def open(self) -> None:
        """Load the starting weights and build the optimizer."""
        try:
            await self._open()
        except FailedPrecondition:
            # A run that ended without us (its coordinator was killed) may hold the trainer still, this one too.
            for run_id in (self._run_id, *await self._ended_runs()):
                await self._close(run_id)
            await self._open()
        self.opened = True

    async def lost(self) -> bool:
        """Whether the session is gone, and with it all that was trained since the last checkpoint."""
        for _ in range(LOST_PROBES):
            try:
                request = pb.GetSessionRequest(run_id=self._run_id)
                await rpc.unary(self.stub.GetSession, request, timeout_s=PROBE_TIMEOUT_S)
            except (FailedPrecondition, Unavailable, DeadlineExceeded):
                return True
            # A front learns of a rank's death a moment after its peers do.
            await asyncio.sleep(PROBE_EVERY_S)
        return False

    def save(self, folder: Path, state: bytes) -> AsyncGenerator[pb.SaveCheckpointResponse]:
        """Checkpoint the session, with `state` inside: a message when it is in memory, another when it is on disk."""
        request = pb.SaveCheckpointRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            path=str(folder),
            policy_version=self.version.to_proto(),
            coordinator_state=state,
        )
        return rpc.server_stream(self.stub.SaveCheckpoint, request, idle_timeout_s=SAVE_TIMEOUT_S)

    async def load(self, folder: Path) -> bytes:
        """Put the session back to a checkpoint; the state that it was saved with."""
        request = pb.LoadCheckpointRequest(
            run_id=self._run_id, request_id=ids.new_request_id(), path=str(folder)
        )
        reply = await rpc.unary(self.stub.LoadCheckpoint, request, timeout_s=SAVE_TIMEOUT_S)
        self.version = Version.from_proto(reply.policy_version)
        return reply.coordinator_state

    async def _open(self) -> None:
        reply = await rpc.unary(
            self.stub.OpenSession,
            pb.OpenSessionRequest(
                run_id=self._run_id,
                request_id=ids.new_request_id(),
                spec=session_spec(self._config, self._dump_dir),
                lineage=self.version.lineage,
            ),
            timeout_s=self._close_timeout_s + SESSION_TIMEOUT_S,
        )
        self.version = Version.from_proto(reply.policy_version)

    async def train(self, batch: Batch) -> pb.UpdateResult:
        """One optimizer update on the whole batch."""
        update_id = ids.update_id(self._run_id, Version(self.version.lineage, batch.step + 1))
        links = [group.span for group in batch.groups if group.span is not None][:MAX_LINKS]
        with telemetry.span(
            names.RL_TRAIN,
            attributes={names.RUN_ID: self._run_id, names.STEP: batch.step, names.UPDATE_ID: update_id},
            links=links,
        ):
            result = await self._trained(update_id, batch)
        self.version = Version.from_proto(result.policy_version)
        return result

    async def logprobs(
        self, sequences: list[tuple[np.ndarray, np.ndarray]], temperature: float
    ) -> tuple[Version, list[np.ndarray]]:
        """Log-probabilities of (prompt, response) pairs under the current policy."""
        request = pb.ComputeLogprobsRequest(run_id=self._run_id, temperature=temperature)
        for index, (prompt, response) in enumerate(sequences):
            request.sequences.add(
                sequence_id=str(index), prompt_token_ids=to_tensor(prompt), token_ids=to_tensor(response)
            )
        reply = await rpc.unary(self.stub.ComputeLogprobs, request, timeout_s=SESSION_TIMEOUT_S)
        by_id = {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}
        return Version.from_proto(reply.policy_version), [by_id[str(i)] for i in range(len(sequences))]

    async def evaluate_loss(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """What the objective says of groups that do not train."""
        request = pb.EvaluateLossRequest(run_id=self._run_id)
        for group in groups:
            _fill(request.groups.add(), group)
        reply = await rpc.unary(self.stub.EvaluateLoss, request, timeout_s=TRAIN_TIMEOUT_S)
        return dict(reply.metrics)

    async def export(self, path: Path) -> None:
        """Write the current policy as a Hugging Face folder."""
        await rpc.unary(
            self.stub.ExportModel,
            pb.ExportModelRequest(
                run_id=self._run_id,
                request_id=ids.new_request_id(),
                path=str(path),
                policy_version=self.version.to_proto(),
            ),
            timeout_s=SESSION_TIMEOUT_S,
        )

    async def close(self) -> None:
        """Give the trainer back."""
        await self._close(self._run_id)

    async def _close(self, run_id: str) -> None:
        request = pb.CloseSessionRequest(run_id=run_id, request_id=ids.new_request_id())
        await rpc.unary(self.stub.CloseSession, request, timeout_s=self._close_timeout_s)

    async def _trained(self, update_id: str, batch: Batch) -> pb.UpdateResult:
        """Send the batch; after a broken stream ask what became of it before sending it again."""
        for attempt in range(1, TRAIN_ATTEMPTS + 1):
            try:
                chunks = self._chunks(update_id, batch)
                reply = await rpc.client_stream(self.stub.Train, chunks, timeout_s=TRAIN_TIMEOUT_S)
                return reply.result
            except Unavailable:
                result = await self._finished_update(update_id)
                if result is not None:
                    return result
                if attempt == TRAIN_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _finished_update(self, update_id: str) -> pb.UpdateResult | None:
        """The result of an update that was begun; None where the session never saw the whole batch."""
        request = pb.GetUpdateRequest(run_id=self._run_id, update_id=update_id)
        try:
            reply = await rpc.unary(self.stub.GetUpdate, request, timeout_s=TRAIN_TIMEOUT_S)
        except NotFound:
            return None
        except (FailedPrecondition, Unavailable) as error:
            raise Unavailable(
                "the trainer went away before it finished the update",
                where=f"update {update_id}",
                why="its session is gone, and with it the updates since the last checkpoint",
                next_step="see `flotilla logs trainer`",
            ) from error
        return reply.result

    async def _chunks(self, update_id: str, batch: Batch) -> AsyncIterator[pb.TrainRequest]:
        """The header, then whole groups in chunks of about two mebibytes."""
        yield pb.TrainRequest(
            header=pb.TrainHeader(
                run_id=self._run_id,
                update_id=update_id,
                policy_version=self.version.to_proto(),
                groups=len(batch.groups),
            )
        )
        request, size = pb.TrainRequest(), 0
        for group in batch.groups:
            _fill(request.chunk.groups.add(), group)
            size += group.nbytes
            if size >= CHUNK_BYTES:
                yield request
                request, size = pb.TrainRequest(), 0
        if request.chunk.groups:
            yield request


def _fill(message: pb.TrainGroup, group: RolloutGroup) -> None:
    """Write a group into a message where it lies: a step's tokens are megabytes, and each copy shows."""
    message.group_id = group.group_id
    message.prompt_token_ids.CopyFrom(to_tensor(group.prompt_token_ids))
    for sample in group.samples:
        message.samples.add(
            sample_id=sample.sample_id,
            token_ids=to_tensor(sample.token_ids),
            logprobs=None if sample.logprobs is None else to_tensor(sample.logprobs),
            reward=sample.reward,
            version_spans=[
                version_pb2.VersionSpan(version=span.version.to_proto(), start=span.start, end=span.end)
                for span in sample.spans
            ],
        )
