"""One run's use of a gang that learns nothing: a reference or a teacher, which scores with the weights of its start."""

from __future__ import annotations

from pathlib import Path

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FlotillaError
from flotilla_core.service import Activities
from flotilla_core.version import Version
from flotilla_trainer.gang.ranks import Gang
from flotilla_trainer.sequence_scores import SequenceScores
from flotilla_trainer.session_ranks import SessionRanks


class FrozenSession:
    """The state between OpenSession and CloseSession; its version never moves."""

    last_update_id = ""

    def __init__(
        self, request: pb.OpenSessionRequest, folder: Path, gang: Gang, activities: Activities
    ) -> None:
        self.run_id = request.run_id
        self.folder = folder
        self.version = Version(request.lineage, 0)
        self._ranks = SessionRanks(request.run_id, request.spec.batching, gang, activities)
        self._scores = SequenceScores(self._ranks, lambda: self.version)

    async def open(self) -> None:
        """Refuse a layout that the model does not allow; the ranks hold all that is needed."""
        self._ranks.layout()

    def end(self, why: FlotillaError) -> None:
        """Let nothing of this session reach the ranks any more; what they do already comes to its end."""
        self._ranks.end(why)

    async def settled(self) -> None:
        """Wait until nothing of this session is under way."""
        await self._ranks.settled()

    async def logprobs(self, request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        """Log-probabilities under the weights of the start, asked for as such or not."""
        asked = pb.ComputeLogprobsRequest()
        asked.CopyFrom(request)
        asked.reference = False  # the ranks keep no second copy of what they hold
        return await self._scores.logprobs(asked)
