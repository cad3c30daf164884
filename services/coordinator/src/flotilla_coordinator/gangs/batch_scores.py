"""What a gang's model says of every token of a batch: a number each, by the id of its sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np

from flotilla.common.v1 import tensor_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.gangs.group_messages import scored_parts
from flotilla_coordinator.gangs.learning_session import TRAIN_TIMEOUT_S
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_core import rpc
from flotilla_core.tensors import from_tensor

if TYPE_CHECKING:
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

Ask = Callable[[list[pb.ScoredSequence]], Awaitable[dict[str, tensor_pb2.Tensor]]]


async def batch_logprobs(
    stub: TrainerServiceAsyncStub, run_id: str, batch: Batch, temperature: float, *, of_start: bool = False
) -> dict[str, np.ndarray]:
    """How likely it finds them, under the weights that the session holds, or those that it started from."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, tensor_pb2.Tensor]:
        request = pb.ComputeLogprobsRequest(
            run_id=run_id, temperature=temperature, reference=of_start, sequences=sequences
        )
        reply = await rpc.unary(stub.ComputeLogprobs, request, timeout_s=TRAIN_TIMEOUT_S)
        return {item.sequence_id: item.logprobs for item in reply.sequences}

    return await _by_sample(batch, ask)


async def batch_values(stub: TrainerServiceAsyncStub, run_id: str, batch: Batch) -> dict[str, np.ndarray]:
    """Return what a critic expects before each of them and, as the last number, after all of them."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, tensor_pb2.Tensor]:
        request = pb.ComputeValuesRequest(run_id=run_id, sequences=sequences, after_last=True)
        reply = await rpc.unary(stub.ComputeValues, request, timeout_s=TRAIN_TIMEOUT_S)
        return {item.sequence_id: item.values for item in reply.sequences}

    return await _by_sample(batch, ask)


async def _by_sample(batch: Batch, ask: Ask) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for sequences in scored_parts(batch.groups):
        answers = await ask(sequences)
        found |= {sample_id: from_tensor(numbers) for sample_id, numbers in answers.items()}
    return found
