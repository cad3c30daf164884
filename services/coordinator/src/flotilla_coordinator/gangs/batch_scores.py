"""What a gang's model says of every token of a batch, by the id of its sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.gangs.group_messages import scored_parts
from flotilla_coordinator.gangs.learning_session import TRAIN_TIMEOUT_S
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_core import rpc
from flotilla_core.config.teachers import TOP_BYTES
from flotilla_core.tensors import from_tensor

if TYPE_CHECKING:
    from flotilla.trainer.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

T = TypeVar("T")
Ask = Callable[[list[pb.ScoredSequence]], Awaitable[dict[str, T]]]


class LikeliestTokens(NamedTuple):
    """Of one sample, what a model says of its tokens and of those that it finds likeliest in their places."""

    logprobs: np.ndarray
    top_token_ids: np.ndarray
    """[tokens, k]."""
    top_logprobs: np.ndarray
    """[tokens, k]."""


async def batch_logprobs(
    stub: TrainerServiceAsyncStub, run_id: str, batch: Batch, temperature: float, *, of_start: bool = False
) -> dict[str, np.ndarray]:
    """How likely it finds them, under the weights that the session holds, or those that it started from."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, np.ndarray]:
        request = pb.ComputeLogprobsRequest(
            run_id=run_id, temperature=temperature, reference=of_start, sequences=sequences
        )
        reply = await rpc.unary(stub.ComputeLogprobs, request, timeout_s=TRAIN_TIMEOUT_S)
        return {item.sequence_id: from_tensor(item.logprobs) for item in reply.sequences}

    return await _by_sample(batch, ask)


async def batch_likeliest_tokens(
    stub: TrainerServiceAsyncStub, run_id: str, batch: Batch, temperature: float, top_k: int
) -> dict[str, LikeliestTokens]:
    """How likely it finds them, and in the place of each the `top_k` tokens that it finds likeliest."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, LikeliestTokens]:
        request = pb.ComputeLogprobsRequest(
            run_id=run_id, temperature=temperature, top_k=top_k, sequences=sequences
        )
        reply = await rpc.unary(stub.ComputeLogprobs, request, timeout_s=TRAIN_TIMEOUT_S)
        return {
            item.sequence_id: LikeliestTokens(
                from_tensor(item.logprobs),
                from_tensor(item.top_token_ids),
                from_tensor(item.top_logprobs),
            )
            for item in reply.sequences
        }

    return await _by_sample(batch, ask, top_k * TOP_BYTES)


async def batch_values(stub: TrainerServiceAsyncStub, run_id: str, batch: Batch) -> dict[str, np.ndarray]:
    """Return what a critic expects before each of them and, as the last number, after all of them."""

    async def ask(sequences: list[pb.ScoredSequence]) -> dict[str, np.ndarray]:
        request = pb.ComputeValuesRequest(run_id=run_id, sequences=sequences, after_last=True)
        reply = await rpc.unary(stub.ComputeValues, request, timeout_s=TRAIN_TIMEOUT_S)
        return {item.sequence_id: from_tensor(item.values) for item in reply.sequences}

    return await _by_sample(batch, ask)


async def _by_sample(batch: Batch, ask: Ask[T], answer_bytes: int = 4) -> dict[str, T]:
    found: dict[str, T] = {}
    for sequences in scored_parts(batch.groups, answer_bytes):
        found |= await ask(sequences)
    return found
