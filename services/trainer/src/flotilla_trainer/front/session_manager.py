"""Open and close sessions; at most one holds the trainer and its gang.

Invariants: a session that is lost with its gang stays lost, and later calls say why; a new session starts from exactly
the weights that it names, whatever was trained before it; after a close, also one during the opening, a session sends
the ranks nothing any more, and fetches nothing. What takes long shows what a rank does, so who waits sees progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import roles
from flotilla_core.agreement import agreement_limits
from flotilla_core.config import BatchingConfig, StackConfig
from flotilla_core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
)
from flotilla_core.logger import get_logger
from flotilla_core.model_folder import model_folder
from flotilla_core.service import Activities
from flotilla_trainer.front.checkpoints import Checkpoints
from flotilla_trainer.front.model_shape import check_same_shape, model_digest
from flotilla_trainer.front.session import ScoringSession, Session
from flotilla_trainer.front.session_files import SessionFiles
from flotilla_trainer.front.session_ranks import MemoryLosses
from flotilla_trainer.front.session_settings import scoring_batching, session_settings
from flotilla_trainer.front.weight_groups import WeightGroups
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.wire.settings import VOCABULARY_HEAD, SessionSettings, first_head, head_for

logger = get_logger()

SHOW_EVERY_S = 1.0


class SessionManager:
    """Opens and closes sessions on one gang."""

    def __init__(
        self,
        gang: Gang,
        plan: GangPlan,
        stack: StackConfig,
        activities: Activities,
        files: SessionFiles,
    ) -> None:
        self._gang = gang
        self._plan = plan
        self._stack = stack
        self._activities = activities
        self._files = files
        self._session: Session | ScoringSession | None = None
        self._closing: asyncio.Task[None] | None = None
        self._opening = ""
        self._opening_over = asyncio.Event()
        self._unwanted = False
        self._why_none = "no run has opened one"
        self._new = plan.model, first_head(plan.role), False
        """The weights and the head that a new gang holds, and whether they are frozen."""
        self._pristine: tuple[Path, str, bool] | None = self._new
        self._memory_losses = MemoryLosses()
        self.checkpoints = Checkpoints(gang, plan.model, activities, files)
        self.weights = WeightGroups(gang, stack.bind, plan.rank_timeout_s, activities)

    def session(self, run_id: str) -> Session | ScoringSession:
        """Return the session of this run, whatever its role."""
        if self._session is None or self._session.run_id != run_id:
            why = self._why_none if self._session is None else f"run {self._session.run_id} holds the trainer"
            raise FailedPrecondition(
                f"run {run_id!r} has no session",
                where=self._plan.name,
                why=why,
                next_step="call OpenSession first",
            )
        return self._session

    def learner(self, run_id: str) -> Session:
        """Return the session of this run if it has an objective and an optimizer."""
        session = self.session(run_id)
        if isinstance(session, ScoringSession):
            raise FailedPrecondition(
                f"the {self._plan.role} does not learn",
                where=self._plan.name,
                why="its weights never change; it only scores sequences",
                next_step="ask the gang of the policy or of the critic",
            )
        return session

    def policy(self, run_id: str) -> Session:
        """Return the session of this run if generators can load its weights."""
        session = self.learner(run_id)
        if not session.writes:
            what = self._plan.role if self._plan.role != roles.POLICY else "reward model"
            raise FailedPrecondition(
                f"the weights of the {what} are not for generators",
                where=self._plan.name,
                next_step="ask the gang of the policy",
            )
        return session

    async def open(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """Start a run's session from the weights that it names."""
        if not request.run_id:
            raise InvalidRequest("run_id is empty", where="OpenSession")
        if self._closing is not None:
            await asyncio.wait({self._closing})
        holder = self._session.run_id if self._session else self._opening
        if holder:
            raise FailedPrecondition(
                f"run {holder} holds the trainer",
                where=self._plan.name,
                next_step=f"wait for it, or stop it with `flotilla run stop {holder}`",
            )
        self._opening, self._unwanted = request.run_id, False
        over = self._opening_over = asyncio.Event()
        try:
            async with self._doing("opening a session", request.run_id):
                session = await self._opened(await self._files.open(request))
        finally:
            self._opening = ""
            over.set()
        if self._unwanted:
            raise Cancelled(f"run {request.run_id} closed its session before it was open")
        self._session = session
        return pb.OpenSessionResponse(
            policy_version=session.version.to_proto(),
            parameters=self._gang.facts["parameters"],
            ranks=self._gang.size,
            model_digest=model_digest(session.folder),
            max_sequence_tokens=session.ranks.limits.max_sequence_tokens,
            vocabulary=session.ranks.limits.vocabulary,
        )

    async def close(self, run_id: str) -> None:
        """End a run's session; do nothing if it is already gone, and cancel it if it is still opening."""
        opening = self._opening_over if self._opening == run_id else None
        if opening is not None:
            self._unwanted = True
            self._files.give_up()
        if self._session is not None and self._session.run_id == run_id:
            # A caller that goes away must not leave the session half closed: closing continues, a repeat waits for it.
            if self._closing is None or self._closing.done():
                self._closing = asyncio.create_task(self._close(self._session), name=f"close {run_id}")
            await asyncio.shield(self._closing)
        elif self._session is None:
            # A checkpoint that a lost session began must not appear after its run returned to an earlier one.
            await self.checkpoints.abandon()
        if opening is not None:
            await self._wait_for_opening(run_id, opening)

    async def export(self, request: pb.ExportModelRequest) -> pb.ExportModelResponse:
        """Write the current policy as a Hugging Face folder."""
        path = self._files.export_path(request.path)
        async with self._doing(f"exporting the model to {path}", request.run_id):
            answers = await self._gang.command(
                "export", {"path": str(path), "dtype": request.dtype}, limit_s=self._gang.slow_timeout_s
            )
            offered = await self._files.offered(path)
        return pb.ExportModelResponse(path=request.path, folder=offered, **answers[0].fields)

    def gang_lost(self, error: FlotillaError) -> None:
        """End the session, whose weights were lost with the ranks."""
        logger.error("the ranks were lost and are being restarted", error=str(error))
        if self._session is not None:
            self._why_none = f"the session of run {self._session.run_id} was lost: {error.what}"
            self._memory_losses.note(self._session.run_id, self._session.ranks.budget, error)
            self._session.ranks.end(error)
        self._session = None
        self._pristine = self._new
        self.checkpoints.give_up()
        self.weights.forget()

    async def _close(self, session: Session | ScoringSession) -> None:
        session.ranks.end(Cancelled(f"run {session.run_id} closed its session"))
        self._files.give_up()
        await session.ranks.settled()
        await self.checkpoints.abandon()
        if self._session is session:
            await self.weights.close_any()
            self._session = None
            self._why_none = f"run {session.run_id} closed it"

    @asynccontextmanager
    async def _doing(self, title: str, run_id: str) -> AsyncIterator[None]:
        """List an activity that has what the first rank does as well."""
        with self._activities.doing(title, run_id=run_id) as activity:

            async def show() -> None:
                while True:
                    await asyncio.sleep(SHOW_EVERY_S)
                    activity.what = "; ".join([title, *self._gang.phases()[:1]])

            showing = asyncio.create_task(show(), name=title)
            try:
                yield
            finally:
                showing.cancel()

    async def _wait_for_opening(self, run_id: str, over: asyncio.Event) -> None:
        """Wait until an opening has ended: its coordinator may be dead, and the next open must find the ranks free."""
        limit_s = self._gang.slow_timeout_s
        try:
            await asyncio.wait_for(over.wait(), limit_s)
        except TimeoutError:
            raise DeadlineExceeded(
                "the session that is opening cannot be closed",
                where=f"run {run_id}",
                why=f"waited {limit_s:g} s for its opening to end; " + "; ".join(self._gang.phases()),
                next_step="close it again; the watch names a rank that hangs and replaces the gang",
            ) from None

    def _asked(self, spec: session_pb2.SessionSpec) -> SessionSettings | BatchingConfig:
        """Check what a session asks for; a gang that learns nothing takes memory limits alone."""
        if self._plan.role in roles.LEARNING:
            settings = session_settings(spec, self._plan.role)
            policy = settings.objective.policy
            limit = None if policy is None else agreement_limits(self._stack, policy.correction).fail_at
            return replace(settings, refuse_above=limit)
        return scoring_batching(spec, self._plan.role)

    async def _opened(self, request: pb.OpenSessionRequest) -> Session | ScoringSession:
        asked = self._asked(request.spec)
        folder = (
            model_folder(request.spec.initial_weights) if request.spec.initial_weights else self._plan.model
        )
        head = head_for(self._plan.role, request.spec.objective.kind)
        check_same_shape(folder, self._plan.model, with_head=head == VOCABULARY_HEAD)
        await self._gang.wait_ready()
        frozen = request.spec.HasField("lora")
        if (folder, head, frozen) != self._pristine:
            # Until the load is done, the weights on the ranks are unknown.
            self._pristine = None
            await self._gang.load(folder, head, frozen=frozen)
            self._pristine = (folder, head, frozen)
        self.weights.forget_epochs()
        session: Session | ScoringSession
        if isinstance(asked, SessionSettings):
            # The session will change the weights on the ranks.
            self._pristine = None
            session = Session(request, asked, folder, self._gang, self._activities)
        else:
            session = ScoringSession(request, asked, self._plan.role, folder, self._gang, self._activities)
        allowed = self._memory_losses.allowed(request.run_id, session.ranks.budget)
        session.ranks.shrink(allowed, "ranks of this run ran out of memory with more")
        await session.open()
        return session
