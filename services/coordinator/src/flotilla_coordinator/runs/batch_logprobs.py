"""How likely a gang's model finds every token of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.runs.batch import Batch
from flotilla_coordinator.runs.group_messages import scored_parts
from flotilla_coordinator.runs.learning_session import TRAIN_TIMEOUT_S
from flotilla_core import rpc
from flotilla_core.tensors import from_tensor

if TYPE_CHECKING:
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub


async def batch_logprobs(
    stub: TrainerServiceAsyncStub, run_id: str, batch: Batch, temperature: float, *, of_start: bool = False
) -> dict[str, np.ndarray]:
    """By sample, under the weights that the session holds, or those that it started from."""
    found: dict[str, np.ndarray] = {}
    for sequences in scored_parts(batch.groups):
        request = pb.ComputeLogprobsRequest(
            run_id=run_id, temperature=temperature, reference=of_start, sequences=sequences
        )
        reply = await rpc.unary(stub.ComputeLogprobs, request, timeout_s=TRAIN_TIMEOUT_S)
        found |= {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}
    return found
