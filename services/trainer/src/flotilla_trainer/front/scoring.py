"""Score given sequences in a session; gangs of a reference or a teacher have sessions that do nothing else.

Invariants: all sequences of a call are scored under one version of the weights, with one number for each response
token, and nothing changes; a session that does not learn scores with the weights of its start.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import BatchingConfig
from flotilla_core.service import Activities
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_trainer.batch.packing import MicroBatch
from flotilla_trainer.batch.tokens import read_scored
from flotilla_trainer.front.session_ranks import SessionRanks
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.wire.frames import Array

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
        """Return the critic's value before each response token, in the order of the request."""
        version, scored = await self._scored(
            request, self._ranks.values, "computing values", after_last=request.after_last
        )
        reply = pb.ComputeValuesResponse(policy_version=version.to_proto())
        for sequence_id, scores in scored:
            reply.sequences.add(sequence_id=sequence_id, values=to_tensor(scores["values"]))
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
    """A run's session on a gang that does not learn: a reference or a teacher.

    It exists between OpenSession and CloseSession. It scores with the weights of its start; its version never changes.
    """

    last_update_id = ""

    def __init__(
        self,
        request: pb.OpenSessionRequest,
        batching: BatchingConfig,
        folder: Path,
        gang: Gang,
        activities: Activities,
    ) -> None:
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
        asked = pb.ComputeLogprobsRequest()
        asked.CopyFrom(request)
        asked.reference = False  # The ranks hold these weights as their model and keep no second copy.
        return await self._scores.logprobs(asked)
