"""The critic's session: it says what it expects of each token, and learns what came.

Invariant: all samples of a batch get the values of one critic, which has not learned from them yet.
"""

from __future__ import annotations

from flotilla_coordinator.gangs.batch_scores import batch_values
from flotilla_coordinator.gangs.learning_session import LearningSession
from flotilla_coordinator.rollouts.batch import Batch


class Critic(LearningSession):
    """The value model of a run."""

    async def value(self, batch: Batch) -> None:
        """Give every sample of the batch what the critic expects before each of its tokens, and after the last."""
        values = await batch_values(self.stub, self._run_id, batch)
        for sample in batch.samples:
            expected = values[sample.sample_id]
            sample.values, sample.value_after = expected[:-1], float(expected[-1])
