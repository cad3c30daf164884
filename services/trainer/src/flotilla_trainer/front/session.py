"""A run's session on the trainer: its objective, its version and its updates, or scores alone.

Gangs of a reference, a teacher or a reward model have sessions that only score.

Invariants: the parts of a session share one lock, so that one call at a time reads or changes weights; a session that
has ended sends the ranks nothing. All sequences of a call are scored under one version of the weights, with one number
for each response token, and nothing changes; a session that does not learn scores with the weights of its start. The
scores of a reward model are those after the last token of a sequence, one for each of its labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import BatchingConfig
from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_core.logger import get_logger
from flotilla_core.roles import REWARD_MODEL, kind_of_role
from flotilla_core.service import Activities
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_trainer.batch.packing import MicroBatch
from flotilla_trainer.batch.tokens import read_scored
from flotilla_trainer.batch.update_batch import StepPlan
from flotilla_trainer.front.gradient_calls import GradientCalls
from flotilla_trainer.front.session_progress import PendingGradients, SessionProgress
from flotilla_trainer.front.session_ranks import SessionRanks
from flotilla_trainer.front.updates import Preparation, Updates
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.objective.session_objective import LOSSES_OF_THEIR_OWN
from flotilla_trainer.wire.frames import Array
from flotilla_trainer.wire.objective import VALUE
from flotilla_trainer.wire.settings import SessionSettings

Columns = dict[str, Array]


class SequenceScores:
    """The scoring calls of one session."""

    def __init__(self, ranks: SessionRanks, version: Callable[[], Version]) -> None:
        self._ranks = ranks
        self._version = version

    async def logprobs(self, request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        """Return log-probabilities under the current weights, or those of the start, in the order of the request."""

        def score(packed: list[list[MicroBatch]], count: int) -> Awaitable[Columns]:
            return self._ranks.scores(
                packed,
                count,
                temperature=request.temperature or 1.0,
                top_k=min(request.top_k, self._ranks.limits.vocabulary),
                reference=request.reference,
                in_float32=request.in_float32,
            )

        version, scored = await self._scored(request, score, "computing log-probabilities")
        reply = pb.ComputeLogprobsResponse(policy_version=version.to_proto())
        for sequence_id, scores in scored:
            item = reply.sequences.add(sequence_id=sequence_id, logprobs=to_tensor(scores["logprobs"]))
            if request.top_k:
                item.top_token_ids.CopyFrom(to_tensor(scores["top_ids"]))
                item.top_logprobs.CopyFrom(to_tensor(scores["top_logprobs"]))
        return reply

    async def values(self, request: pb.ComputeValuesRequest) -> pb.ComputeValuesResponse:
        """Return the values before each response token, in the order of the request."""
        version, scored = await self._scored(
            request, self._ranks.values, "computing values", after_last=request.after_last
        )
        reply = pb.ComputeValuesResponse(policy_version=version.to_proto())
        for sequence_id, scores in scored:
            reply.sequences.add(sequence_id=sequence_id, values=to_tensor(scores["values"].reshape(-1)))
        return reply

    async def _scored(
        self,
        request: pb.ComputeLogprobsRequest | pb.ComputeValuesRequest,
        score: Callable[[list[list[MicroBatch]], int], Awaitable[Columns]],
        what: str,
        *,
        after_last: bool = False,
    ) -> tuple[Version, Iterator[tuple[str, Columns]]]:
        """Return the version that scored, and the scores of each sequence."""
        sequence_ids, sequences, lengths = read_scored(
            request.sequences, self._ranks.limits, after_last=after_last
        )
        packed = self._ranks.pack(sequences)
        async with self._ranks.exclusive:
            version = self._version()
            with self._ranks.doing(what):
                columns = await score(packed, len(sequences.scored))
        edges = pairwise([0, *lengths.cumsum().tolist()])
        return version, (
            (sequence_id, {name: column[start:end] for name, column in columns.items()})
            for sequence_id, (start, end) in zip(sequence_ids, edges, strict=True)
        )


class ScoringSession:
    """A run's session on a gang that does not learn: a reference, a teacher or a reward model.

    It exists between OpenSession and CloseSession. It scores with the weights of its start; its version never changes.
    """

    last_update_id = ""

    def __init__(
        self,
        request: pb.OpenSessionRequest,
        batching: BatchingConfig,
        role: str,
        folder: Path,
        gang: Gang,
        activities: Activities,
    ) -> None:
        self._role = role
        self.run_id = request.run_id
        self.folder = folder
        self.version = Version(request.lineage, 0)
        self.ranks = SessionRanks(request.run_id, batching, gang, activities)
        self._scores = SequenceScores(self.ranks, lambda: self.version)

    async def open(self) -> None:
        """Refuse a layout that the model does not allow; the ranks need no command."""
        self.ranks.layout()

    async def logprobs(self, request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        """Return log-probabilities under the weights of the start, whether the request names the reference or not."""
        if self._gives_rewards:
            raise self._has_none("log-probabilities")
        asked = pb.ComputeLogprobsRequest()
        asked.CopyFrom(request)
        asked.reference = False  # The ranks hold these weights as their model and keep no second copy.
        return await self._scores.logprobs(asked)

    async def values(self, request: pb.ComputeValuesRequest) -> pb.ComputeValuesResponse:
        """Return the scores after the last token of each sequence, whose tokens are all in its prompt."""
        if not self._gives_rewards:
            raise self._has_none("values")
        if not request.after_last or any(one.token_ids.data for one in request.sequences):
            raise InvalidRequest(
                "a reward model scores whole sequences",
                where="ComputeValues",
                next_step="send all tokens of a sequence as its prompt, with after_last",
            )
        return await self._scores.values(request)

    @property
    def _gives_rewards(self) -> bool:
        return kind_of_role(self._role) == REWARD_MODEL

    def _has_none(self, what: str) -> FailedPrecondition:
        return FailedPrecondition(f"a {kind_of_role(self._role)} has no {what}", where=f"run {self.run_id}")


A_POLICY = "a policy"

logger = get_logger()


class Session:
    """The state of a run between OpenSession and CloseSession."""

    def __init__(
        self,
        request: pb.OpenSessionRequest,
        settings: SessionSettings,
        folder: Path,
        gang: Gang,
        activities: Activities,
    ) -> None:
        run_id, spec = request.run_id, request.spec
        self.run_id = run_id
        self.folder = folder
        self._spec = spec
        self._settings = settings
        self.ranks = ranks = SessionRanks(run_id, settings.batching, gang, activities)
        self._progress = progress = SessionProgress(run_id, settings, request.lineage)
        self._scores = SequenceScores(ranks, lambda: progress.version)
        self._preparation = prepared = Preparation(spec.seed, ranks)
        self._pending = pending = PendingGradients(run_id)
        self.updates = Updates(
            spec.dump_dir, StepPlan.of(settings.optimizer), ranks, prepared, progress, pending
        )
        """Serves Train and GetUpdate."""
        self.gradients = GradientCalls(settings.objective, self.updates)
        """Serves ForwardBackward and OptimStep."""

    @property
    def writes(self) -> bool:
        """Return whether the session trains a policy, which writes samples and which generators can load."""
        return self._learner == A_POLICY

    @property
    def _learner(self) -> str:
        return LOSSES_OF_THEIR_OWN.get(self._settings.objective.kind, A_POLICY)

    @property
    def version(self) -> Version:
        """The version of the weights that the ranks hold."""
        return self._progress.version

    @property
    def last_update_id(self) -> str:
        """The id of the update that was sent last; empty before the first."""
        return self.updates.last_id

    async def open(self) -> None:
        """Build the optimizer on the ranks, and let micro-batches be as large as the ranks have memory for."""
        packed, refusal = self.ranks.layout().packed, self.ranks.packing_refusal
        logger.info("session opens", run_id=self.run_id, packed=packed, packing_refusal=refusal)
        answers = await self.ranks.command("open_session", self._settings.fields())
        self.ranks.shrink(answers[0].fields["fits"], "a rank lacks the memory for larger ones")

    def check_version(self, version: Version, what: str) -> None:
        """Refuse work for another version than the current one."""
        self._progress.check_version(version, what)

    @contextlib.asynccontextmanager
    async def holding(self, version: Version, what: str) -> AsyncIterator[None]:
        """Keep the weights at `version` inside the block; an earlier update is finished first, and no other runs."""
        async with self.ranks.exclusive:
            self.ranks.check_open()
            self.check_version(version, what)
            yield

    def facts(self) -> dict[str, Any]:
        """Return the facts of this session for a checkpoint, in addition to the numbers of its ranks."""
        specification = json_format.MessageToDict(self._spec, preserving_proto_field_name=True)
        return {"run_id": self.run_id, **self._progress.facts(), "specification": specification}

    def continue_from(self, facts: dict[str, Any], *, fresh_objective: bool = False) -> None:
        """Continue this session's lineage at the step of the checkpoint with these facts, which the ranks now hold."""
        self._progress.continue_from(facts, fresh_objective=fresh_objective)
        self._pending.clear(forget=True)

    async def evaluate(self, groups: Sequence[pb.TrainGroup]) -> pb.EvaluateLossResponse:
        """Return the loss of a batch; nothing changes."""
        async with self.ranks.exclusive:
            version = self.version
            prepared = await self._preparation.of("evaluate", groups, version, self._progress.objective)
            with self.ranks.doing("evaluating the loss"):
                answers = await self.ranks.work("evaluate", prepared.packed, {})
        metrics = answers[0].fields["metrics"] | prepared.facts
        return pb.EvaluateLossResponse(policy_version=version.to_proto(), metrics=metrics)

    async def values(self, request: pb.ComputeValuesRequest) -> pb.ComputeValuesResponse:
        """Return the critic's value before each response token."""
        if self._settings.objective.kind != VALUE:
            raise FailedPrecondition(
                f"{self._learner} has no values",
                where=f"run {self.run_id}",
                next_step="ask the gang of the critic",
            )
        return await self._scores.values(request)

    async def logprobs(self, request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        """Return log-probabilities under the current policy, or the one that the session started from."""
        if not self.writes:
            raise FailedPrecondition(
                f"{self._learner} has no log-probabilities",
                where=f"run {self.run_id}",
                next_step="ask the gang of the policy",
            )
        if request.reference and not self._settings.objective.keeps_reference:
            raise FailedPrecondition(
                "this session keeps no reference",
                where=f"run {self.run_id}",
                why="its objective asks for no divergence, or its reference comes with the samples",
                next_step="set kl.placement, or ask the gang of the reference",
            )
        return await self._scores.logprobs(request)
