"""The critic's session: it says what it expects of each token, and learns what came.

Invariant: all samples of a batch get the values of one critic, which has not learned from them yet.
"""

from __future__ import annotations

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.runs.batch import Batch
from flotilla_coordinator.runs.group_messages import scored_parts
from flotilla_coordinator.runs.learning_session import TRAIN_TIMEOUT_S, LearningSession
from flotilla_core import rpc
from flotilla_core.tensors import from_tensor


class Critic(LearningSession):
    """The value model of a run."""

    async def value(self, batch: Batch) -> None:
        """Give every sample of the batch what the critic expects before each of its tokens."""
        values: dict[str, np.ndarray] = {}
        for sequences in scored_parts(batch.groups):
            request = pb.ComputeValuesRequest(run_id=self._run_id, sequences=sequences)
            reply = await rpc.unary(self.stub.ComputeValues, request, timeout_s=TRAIN_TIMEOUT_S)
            values |= {item.sequence_id: from_tensor(item.values) for item in reply.sequences}
        for sample in batch.samples:
            sample.values = values[sample.sample_id]
