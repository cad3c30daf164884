"""One run's session on one gang, whatever the gang holds.

Invariants: `version` is the gang's own answer, never a guess; a gang that is leased to this run is taken back from
every run of the same ledger, and from no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import ids, rpc
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from flotilla_core.roles import process_name
from flotilla_core.version import Version

if TYPE_CHECKING:
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub


SESSION_TIMEOUT_S = 300.0
CLOSE_SLACK_S = 30.0
"""For what a gang still gives up once the last command of a session is through."""
PROBE_TIMEOUT_S = 10.0
LOST_PROBES = 5
PROBE_EVERY_S = 0.5
NOT_THERE = (FailedPrecondition, Unavailable, DeadlineExceeded)


@dataclass(frozen=True)
class Gang:
    """Where a session is opened."""

    role: str
    stub: TrainerServiceAsyncStub
    instance_id: str
    longest_command_s: float
    slot: str
    """What its logs are called, of several gangs of a role too."""

    @property
    def name(self) -> str:
        """What its section of the stack file is called."""
        return process_name(self.role)


class GangSession:
    """Opened, asked whether it is still there, closed."""

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
        # A session is closed when its last command is through, and the next one opens after that.
        self._close_timeout_s = gang.longest_command_s + CLOSE_SLACK_S
        self.gang = gang
        self.stub = gang.stub
        self.version = Version(lineage, 0)
        self.opened = False
        """Whether the gang has a session of this run, as far as is known here."""

    async def open(self) -> None:
        """Load the starting weights, and build the optimizer where there is one."""
        try:
            await self._open()
        except FailedPrecondition:
            # The gang is ours: what holds it still is over, by a coordinator that was killed, or went on elsewhere.
            for run_id in (self._run_id, *await self._known_runs()):
                await self._close(run_id)
            await self._open()
        self.opened = True

    async def left(self) -> pb.GetSessionResponse | None:
        """Where a session of this run stands that an earlier coordinator opened; None where there is none."""
        try:
            request = pb.GetSessionRequest(run_id=self._run_id)
            return await rpc.unary(self.stub.GetSession, request, timeout_s=PROBE_TIMEOUT_S)
        except NOT_THERE:
            return None

    async def lost(self) -> bool:
        """Whether the session is gone, and with it all that was trained since the last checkpoint."""
        for _ in range(LOST_PROBES):
            try:
                request = pb.GetSessionRequest(run_id=self._run_id)
                await rpc.unary(self.stub.GetSession, request, timeout_s=PROBE_TIMEOUT_S)
            except NOT_THERE:
                return True
            # A front learns of a rank's death a moment after its peers do.
            await asyncio.sleep(PROBE_EVERY_S)
        return False

    async def close(self) -> None:
        """Give the gang back."""
        await self._close(self._run_id)

    async def _open(self) -> None:
        reply = await rpc.unary(
            self.stub.OpenSession,
            pb.OpenSessionRequest(
                run_id=self._run_id,
                request_id=ids.new_request_id(),
                spec=self._spec,
                lineage=self.version.lineage,
            ),
            timeout_s=self._close_timeout_s + SESSION_TIMEOUT_S,
        )
        self.version = Version.from_proto(reply.policy_version)

    async def _close(self, run_id: str) -> None:
        request = pb.CloseSessionRequest(run_id=run_id, request_id=ids.new_request_id())
        await rpc.unary(self.stub.CloseSession, request, timeout_s=self._close_timeout_s)
