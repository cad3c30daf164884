"""RewardService on the wire.

Invariant: a call that waits for a worker, loads a file or scores gives signs of life, so its caller needs no guess of
how long that takes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc
from flotilla_reward import catalog, scoring
from flotilla_reward.pool import WorkerPool

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Stateless: a call knows everything that it needs."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def ListRewards(self, request: pb.ListRewardsRequest, context: Context) -> pb.ListRewardsResponse:
        return pb.ListRewardsResponse(rewards=catalog.list_rewards())

    async def Score(self, request: pb.ScoreRequest, context: Context) -> AsyncIterator[pb.ScoreResponse]:
        terms = scoring.resolve(request.rewards)
        async with aclosing(scoring.load(terms, self._pool, request.run_id)) as signs:
            async for sign in signs:
                yield sign
        responses = scoring.score_items(request.items, terms, self._pool, request.run_id)
        async with aclosing(responses):
            async for response in responses:
                yield response
