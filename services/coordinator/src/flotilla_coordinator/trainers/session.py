"""Manages one run's session on one gang, and the training of a model whose weights change.

Invariants: `version` is the gang's own answer, never a guess. A gang that is leased to this run is taken back from
every run of the same ledger, and from no other. Policy and critic learn, are saved and are loaded in the same way.
One batch has one `update_id` for ever: a skipped update changes no version, but the next batch is another update. So
a broken stream is resolved by GetUpdate, or sent again, and never trained twice. A gang that opens a session, loads a
checkpoint or exports may fetch or write hundreds of GB: it is waited for while it makes progress, without a limit in
total.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_coordinator.trainers.messages import fill, parts
from flotilla_core import ids, rpc, telemetry
from flotilla_core.checkpoint import CheckpointShelf, on_disk
from flotilla_core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
    Mismatch,
    NotFound,
    Unavailable,
)
from flotilla_core.roles import process_name
from flotilla_core.tasks import run_while
from flotilla_core.telemetry import names
from flotilla_core.transfer import Files
from flotilla_core.version import Version

if TYPE_CHECKING:
    from flotilla.common.v1.files_pb2 import FolderReference
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

T = TypeVar("T")

SESSION_TIMEOUT_S = 300.0
CLOSE_SLACK_S = 30.0
"""The time in which a gang cleans up after the last command of a session."""
PROBE_TIMEOUT_S = 10.0
LOST_PROBES = 5
PROBE_EVERY_S = 0.5
ABSENT_LOOKS = 3
ABSENT_EVERY_S = 5.0
"""The time between two looks for a gang whose files are fetched: it may be out of reach for a moment, so it is gone
only after `ABSENT_LOOKS` of them."""
COORDINATOR = "coordinator"
"""The name of the process that fetches for a run where no gang does."""
NOT_THERE = (FailedPrecondition, Unavailable, DeadlineExceeded)

TRAIN_TIMEOUT_S = 3600.0
TRAIN_ATTEMPTS = 3
SAVE_TIMEOUT_S = 3600.0
MAX_LINKS = 128
GROUPS_AT_ONCE = 8
"""The number of groups after which the event loop goes on: a whole part would block it for tens of milliseconds."""


@dataclass(frozen=True)
class Gang:
    """The gang on which a session is opened."""

    role: str
    stub: TrainerServiceAsyncStub
    instance_id: str
    longest_command_s: float
    slot: str
    """The name of its slot, which its logs have as well, also where a role has several gangs."""
    files: Files
    """Fetches what the gang wrote on another host, and offers it what it shall read there."""
    channel: grpc.aio.Channel | None
    """The channel over which the gang says what it does, while it is waited for; None where it cannot be asked."""
    tell: Callable[[str, str], None]
    """Called with the name of a service and what it does, while the run waits for it; with "" when that is over."""

    @property
    def name(self) -> str:
        """Return the name of its section in the stack file."""
        return process_name(self.role)


class GangSession:
    """A session on a gang: it is opened, checked for loss, and closed."""

    def __init__(
        self,
        run_id: str,
        spec: session_pb2.SessionSpec,
        gang: Gang,
        known_runs: Callable[[], Awaitable[list[str]]],
        lineage: int = 0,
    ) -> None:
        self._run_id = run_id
        self._spec = spec
        self._known_runs = known_runs
        # A session closes when its last command has ended, and the next one opens after that.
        self._close_timeout_s = gang.longest_command_s + CLOSE_SLACK_S
        self.gang = gang
        self.stub = gang.stub
        self.version = Version(lineage, 0)
        self.opened = False
        """True once the gang has a session of this run, as far as this coordinator has opened it."""
        self.longest_sequence = 0
        """The most tokens of a sequence, as the gang said of its session; 0 where there is no limit."""
        self.vocabulary = 0
        """The number of token ids that the model has, as the gang said of its session; 0 where it said none."""

    async def open(self) -> None:
        """Load the starting weights, and build the optimizer where there is one."""
        try:
            await self._open()
        except FailedPrecondition:
            # The gang is ours: a session that still holds it is left over from a coordinator that was killed, or a run
            # that moved.
            for run_id in (self._run_id, *await self._known_runs()):
                await self._close(run_id)
            await self._open()

    def attach(self, found: pb.GetSessionResponse | pb.OpenSessionResponse) -> None:
        """Continue with the session as the gang tells of it."""
        self.opened, self.version = True, Version.from_proto(found.policy_version)
        self.longest_sequence, self.vocabulary = found.max_sequence_tokens, found.vocabulary

    async def left(self) -> pb.GetSessionResponse | None:
        """Return the session of this run that an earlier coordinator opened; None where there is none."""
        try:
            request = pb.GetSessionRequest(run_id=self._run_id)
            return await rpc.unary(self.stub.GetSession, request, timeout_s=PROBE_TIMEOUT_S)
        except NOT_THERE:
            return None

    async def lost(self) -> bool:
        """Return whether the session is gone, and with it all updates since the last checkpoint."""
        for _ in range(LOST_PROBES):
            try:
                request = pb.GetSessionRequest(run_id=self._run_id)
                await rpc.unary(self.stub.GetSession, request, timeout_s=PROBE_TIMEOUT_S)
            except NOT_THERE:
                return True
            # A front reports the death of a rank slightly later than the other ranks do.
            await asyncio.sleep(PROBE_EVERY_S)
        return False

    async def close(self) -> None:
        """Close the session, which frees the gang."""
        await self._close(self._run_id)

    async def _open(self) -> None:
        call = rpc.unary(
            self.stub.OpenSession,
            pb.OpenSessionRequest(
                run_id=self._run_id,
                request_id=ids.new_request_id(),
                spec=self._spec,
                lineage=self.version.lineage,
            ),
            timeout_s=rpc.UNLIMITED_S,
        )
        self.attach(await self._in_patience(call, self._close_timeout_s + SESSION_TIMEOUT_S))

    async def _in_patience(self, call: Awaitable[T], idle_timeout_s: float) -> T:
        """Return the answer of the gang, however long it takes, unless it makes no progress for too long."""
        patience = rpc.Patience(self.gang.channel, self._run_id, partial(self.gang.tell, self.gang.slot))
        return await patience.answer(call, idle_timeout_s=idle_timeout_s, where=self.gang.slot)

    async def _close(self, run_id: str) -> None:
        request = pb.CloseSessionRequest(run_id=run_id, request_id=ids.new_request_id())
        await rpc.unary(self.stub.CloseSession, request, timeout_s=self._close_timeout_s)


class LearningSession(GangSession):
    """A session whose weights change: policy and critic learn, are saved and are loaded in the same way."""

    async def train(self, batch: Batch) -> pb.UpdateResult:
        """Make one optimizer update on the whole batch."""
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
        """Let the schedule have another peak and another length from the next update on."""
        self._spec.optimizer.fields["learning_rate"].number_value = learning_rate
        self._spec.total_updates = total_updates

    def save(self, folder: Path, state: bytes) -> AsyncGenerator[pb.SaveCheckpointResponse]:
        """Write a checkpoint with `state` inside; yield a message when it is in memory, and one when on disk."""
        request = pb.SaveCheckpointRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            path=str(folder),
            policy_version=self.version.to_proto(),
            coordinator_state=state,
        )
        return self._saved(folder, request)

    async def load(
        self, folder: Path, *, fresh_optimizer: bool = False, fresh_objective: bool = False
    ) -> bytes:
        """Load a checkpoint, or what of it counts, into the session; return the state that it was saved with."""
        request = pb.LoadCheckpointRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            path=str(folder),
            fresh_optimizer=fresh_optimizer,
            fresh_objective=fresh_objective,
        )
        with suppress(FlotillaError):  # the gang says what is wrong with a checkpoint that it cannot load
            offered = await asyncio.to_thread(self.gang.files.offer, folder, sealed=True)
            request.folder.CopyFrom(offered)
        call = rpc.unary(self.stub.LoadCheckpoint, request, timeout_s=rpc.UNLIMITED_S)
        reply = await self._in_patience(call, SAVE_TIMEOUT_S)
        self.version = Version.from_proto(reply.policy_version)
        return reply.coordinator_state

    async def finished_update(self, update_id: str) -> pb.UpdateResult | None:
        """Return the result of an update that was begun; None where the session did not receive the whole batch."""
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

    async def _saved(
        self, folder: Path, request: pb.SaveCheckpointRequest
    ) -> AsyncGenerator[pb.SaveCheckpointResponse]:
        """Yield the stages of a save; what the gang wrote on another host is here before it counts as durable."""
        stages = rpc.server_stream(self.stub.SaveCheckpoint, request, idle_timeout_s=SAVE_TIMEOUT_S)
        async with aclosing(stages):
            async for stage in stages:
                if stage.durable.HasField("folder"):
                    await self._copy(stage.durable.folder, folder)
                yield stage

    async def _copy(self, reference: FolderReference, folder: Path) -> None:
        """Bring a checkpoint of the gang to its place in the run's directory."""
        shelf, name = CheckpointShelf(folder.parent), folder.name
        aside = await asyncio.to_thread(on_disk, folder, shelf.begin, name)
        fetch = asyncio.ensure_future(self.gang.files.fetch_into(reference, aside, self._run_id))
        try:
            await run_while(fetch, self._fail_when_absent())
            await fetch
            await asyncio.to_thread(on_disk, folder, shelf.publish, name)
        finally:
            fetch.cancel()
            await asyncio.wait({fetch})
            await asyncio.to_thread(shelf.discard, name)

    async def _fail_when_absent(self) -> None:
        """Raise when the gang has no session of this run any more: nobody has the files that it wrote."""
        absent = 0
        while absent < ABSENT_LOOKS:
            await asyncio.sleep(ABSENT_EVERY_S)
            absent = absent + 1 if await self.lost() else 0
        raise Unavailable(
            f"the {self.gang.name} went away before its checkpoint had arrived",
            where=self.gang.slot,
            next_step=f"see `flotilla logs {self.gang.slot}`",
        )

    async def _trained(self, update_id: str, batch: Batch) -> pb.UpdateResult:
        """Send the batch; after a broken stream, ask for the update's result before sending it again."""
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
        """Refuse the result of an earlier update that was made of other samples than the record says."""
        other = set(result.sample_ids) ^ {sample.sample_id for sample in batch.samples}
        if result.sample_ids and other:
            raise Mismatch(
                f"update {result.update_id} was made of other samples",
                where=self.gang.name,
                why=f"{len(other)} samples are in one of both alone, {min(other)} among them",
                next_step=f"continue from the last checkpoint: flotilla run resume {self._run_id}",
            )

    def _header(self, update_id: str, batch: Batch) -> pb.TrainHeader:
        return pb.TrainHeader(
            run_id=self._run_id,
            update_id=update_id,
            policy_version=self.version.to_proto(),
            groups=len(batch.groups),
            learning_rate=pb.LearningRate(
                peak=self._spec.optimizer.fields["learning_rate"].number_value,
                total_updates=self._spec.total_updates,
            ),
        )

    async def _requests(self, update_id: str, batch: Batch) -> AsyncIterator[pb.TrainRequest]:
        """Yield the header, then whole groups part by part."""
        yield pb.TrainRequest(header=self._header(update_id, batch))
        for part in parts(batch.groups):
            request = pb.TrainRequest()
            for number, group in enumerate(part, start=1):
                fill(request.chunk.groups.add(), group)
                if number % GROUPS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            yield request
