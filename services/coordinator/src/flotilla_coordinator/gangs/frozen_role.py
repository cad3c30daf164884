"""The session of a gang that learns nothing: a reference or a teacher.

Invariant: it says how likely its model finds each token of a batch under the weights of its start, which never change;
so nothing of it is saved, and a session that is opened again says the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from flotilla.trainer.v1 import session_pb2
from flotilla_coordinator.gangs.batch_scores import batch_likeliest_tokens, batch_logprobs
from flotilla_coordinator.gangs.gang_session import Gang, GangSession
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_core.roles import TEACHER, kind_of_role


class FrozenRole(GangSession):
    """Scores batches at the temperature of the rollouts."""

    def __init__(
        self,
        run_id: str,
        spec: session_pb2.SessionSpec,
        gang: Gang,
        known_runs: Callable[[], Awaitable[list[str]]],
        lineage: int,
        temperature: float,
        top_k: int = 0,
    ) -> None:
        super().__init__(run_id, spec, gang, known_runs, lineage)
        self._temperature = temperature
        self._top_k = top_k

    async def logprobs(self, batch: Batch) -> dict[str, np.ndarray]:
        """What this model says of each token of the batch, by the id of its sample."""
        return await batch_logprobs(self.stub, self._run_id, batch, self._temperature)

    async def score(self, batch: Batch) -> None:
        """Give every sample of the batch what this model says of each of its tokens.

        A teacher that was opened with a `top_k` also says which tokens it finds likeliest in their places.
        """
        if self._top_k:
            await self._score_likeliest(batch)
            return
        found = await self.logprobs(batch)
        for sample in batch.samples:
            if kind_of_role(self.gang.role) == TEACHER:
                sample.teacher_logprobs = found[sample.sample_id]
            else:
                sample.reference_logprobs = found[sample.sample_id]

    async def _score_likeliest(self, batch: Batch) -> None:
        found = await batch_likeliest_tokens(self.stub, self._run_id, batch, self._temperature, self._top_k)
        for sample in batch.samples:
            said = found[sample.sample_id]
            sample.teacher_logprobs = said.logprobs
            sample.teacher_top_token_ids, sample.teacher_top_logprobs = said.top_token_ids, said.top_logprobs
