"""A session whose weights change: policy and critic learn, are saved and are put back alike.

Invariants: one batch is one `update_id` for ever (a skipped update moves no version, but the next batch is another
update), so a stream that broke is answered by GetUpdate, or sent again, and never trained twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.gangs.gang_session import GangSession
from flotilla_coordinator.gangs.group_messages import fill, parts
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_core import ids, rpc, telemetry
from flotilla_core.errors import FailedPrecondition, Mismatch, NotFound, Unavailable
from flotilla_core.telemetry import names
from flotilla_core.version import Version

TRAIN_TIMEOUT_S = 3600.0
TRAIN_ATTEMPTS = 3
SAVE_TIMEOUT_S = 3600.0
MAX_LINKS = 128
GROUPS_IN_ONE_TURN = 8
"""Writing a whole part takes tens of milliseconds, in which everybody else would wait."""


class LearningSession(GangSession):
    """Trained a batch at a time."""

    async def train(self, batch: Batch) -> pb.UpdateResult:
        """One optimizer update on the whole batch."""
        update_id = ids.update_id(self._run_id, Version(self.version.lineage, batch.step + 1))
        links = [group.span for group in batch.groups if group.span is not None][:MAX_LINKS]
        attributes: dict[str, str | int] = {
            names.RUN_ID: self._run_id,
            names.STEP: batch.step,
            names.UPDATE_ID: update_id,
            names.ROLE: self.gang.role,
        }
        with telemetry.span(names.RL_TRAIN, attributes=attributes, links=links):
            result = await self._trained(update_id, batch)
        self._refuse_other_samples(result, batch)
        self.version = Version.from_proto(result.policy_version)
        return result

    def reschedule(self, learning_rate: float, total_updates: int) -> None:
        """From the next update on."""
        self._spec.optimizer.learning_rate, self._spec.total_updates = learning_rate, total_updates

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

    async def finished_update(self, update_id: str) -> pb.UpdateResult | None:
        """The result of an update that was begun; None where the session never saw the whole batch."""
        request = pb.GetUpdateRequest(run_id=self._run_id, update_id=update_id)
        try:
            reply = await rpc.unary(self.stub.GetUpdate, request, timeout_s=TRAIN_TIMEOUT_S)
        except NotFound:
            return None
        except (FailedPrecondition, Unavailable) as error:
            raise Unavailable(
                f"the {self.gang.name} went away before it finished the update",
                where=f"update {update_id}",
                why="its session is gone, and with it the updates since the last checkpoint",
                next_step=f"see `flotilla logs {self.gang.slot}`",
            ) from error
        return reply.result

    async def _trained(self, update_id: str, batch: Batch) -> pb.UpdateResult:
        """Send the batch; after a broken stream ask what became of it before sending it again."""
        for attempt in range(1, TRAIN_ATTEMPTS + 1):
            try:
                requests = self._requests(update_id, batch)
                reply = await rpc.client_stream(self.stub.Train, requests, timeout_s=TRAIN_TIMEOUT_S)
                return reply.result
            except Unavailable:
                result = await self.finished_update(update_id)
                if result is not None:
                    return result
                if attempt == TRAIN_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _refuse_other_samples(self, result: pb.UpdateResult, batch: Batch) -> None:
        """What an update that was made before was made of is what is recorded of it."""
        other = set(result.sample_ids) ^ {sample.sample_id for sample in batch.samples}
        if result.sample_ids and other:
            raise Mismatch(
                f"update {result.update_id} was made of other samples",
                where=self.gang.name,
                why=f"{len(other)} samples are in one of both alone, {min(other)} among them",
                next_step=f"go on from the last checkpoint: flotilla run resume {self._run_id}",
            )

    async def _requests(self, update_id: str, batch: Batch) -> AsyncIterator[pb.TrainRequest]:
        """The header, then whole groups part by part."""
        yield pb.TrainRequest(
            header=pb.TrainHeader(
                run_id=self._run_id,
                update_id=update_id,
                policy_version=self.version.to_proto(),
                groups=len(batch.groups),
                learning_rate=pb.LearningRate(
                    peak=self._spec.optimizer.learning_rate, total_updates=self._spec.total_updates
                ),
            )
        )
        for part in parts(batch.groups):
            request = pb.TrainRequest()
            for number, group in enumerate(part, start=1):
                fill(request.chunk.groups.add(), group)
                if number % GROUPS_IN_ONE_TURN == 0:
                    await asyncio.sleep(0)
            yield request
