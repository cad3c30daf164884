"""Prepare an update for the ranks: check it, score it where the objective asks for it, and lay it out.

Invariant: preparing an update changes nothing in the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import ids
from flotilla_core.version import Version
from flotilla_trainer.batch.packing import MicroBatch, fed_tokens, padding_share
from flotilla_trainer.batch.step_plan import StepPlan
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.front.session_ranks import SessionRanks
from flotilla_trainer.objective.base import SessionObjective
from flotilla_trainer.objective.pairs import RewardUpdate, after_answers
from flotilla_trainer.wire.frames import Array

ONE_STEP = StepPlan()


def score_squares(logprobs: Array, squares: Array) -> Array:
    """Return 1 - 2 p + the sum of all p^2: p is the probability of a token, the sum is over the vocabulary."""
    return 1.0 - 2.0 * np.exp(logprobs.astype(np.float64)) + squares


@dataclass(frozen=True)
class PreparedUpdate:
    """The micro-batches of an update, and its facts."""

    batch: UpdateBatch
    packed: list[list[MicroBatch]]
    facts: dict[str, float]
    """Metrics of the objective, means over the trained tokens or the pairs of the batch."""
    steps: list[int]
    """The number of micro-batches of each optimizer step; those of a step follow those of the step before."""
    counts: bool = True
    """False if no token can change a weight, because the objective left out every group."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that need no rank."""
        return self.facts | {
            "tokens/response_mean": float(self.batch.response_lengths.mean()),
            "tokens/fed": float(fed_tokens(self.packed)),
            "tokens/padding_share": padding_share(self.packed),
            "microbatches": float(len(self.packed[0])),
        }


class Preparation:
    """Prepares the updates of one session."""

    def __init__(self, seed: int, ranks: SessionRanks) -> None:
        self._seed = seed
        self._ranks = ranks

    async def of(
        self,
        update_id: str,
        groups: Sequence[pb.TrainGroup],
        version: Version,
        objective: SessionObjective,
        plan: StepPlan = ONE_STEP,
    ) -> PreparedUpdate:
        """Prepare the update of `version` on these groups, in as many steps as planned."""
        writer = version if objective.writes_samples else None
        batch = await asyncio.to_thread(UpdateBatch.read, groups, self._ranks.limits, writer)
        if objective.scores_reference(batch):
            scores = await self.scores(batch, objective, reference=True)
            batch = replace(batch, reference_logprobs=scores["logprobs"])
        policy: Array | None = None
        if objective.scores_policy(several_steps=plan.several):
            if isinstance(objective, RewardUpdate):
                policy = await self._rewards(batch)
            else:
                policy = (await self.scores(batch, objective))["logprobs"]
        if objective.scores_distributions(batch):
            scores = await self.scores(batch, objective, squares=True)
            batch = replace(batch, score_squares=score_squares(scores["logprobs"], scores["squares"]))

        def lay_out() -> PreparedUpdate:
            # The same for an update and its repetition in a later lineage: it depends on the step alone.
            seed = ids.derive_seed("shuffle", self._seed, update_id.rpartition("/")[2].rpartition(".")[2])
            sequences, facts = objective.sequences(batch, seed, policy, plan.parts(batch))
            steps = plan.steps(sequences, batch)
            packs = [self._ranks.pack(step) for step in steps or [sequences]]
            packed = [list(chain.from_iterable(of_rank)) for of_rank in zip(*packs, strict=True)]
            return PreparedUpdate(batch, packed, facts, [len(pack[0]) for pack in packs], bool(steps))

        return await asyncio.to_thread(lay_out)

    async def _rewards(self, batch: UpdateBatch) -> Array:
        """Return the reward of every answer under the current reward model."""
        sequences = after_answers(batch)
        packed = await asyncio.to_thread(self._ranks.pack, sequences)
        with self._ranks.doing("scoring with the reward model"):
            scores = await self._ranks.values(packed, len(sequences.scored))
        return scores["values"]

    async def scores(
        self, batch: UpdateBatch, objective: SessionObjective, **asked: bool
    ) -> dict[str, Array]:
        """Score every response token under the current policy, or under the one that the session started from."""
        sequences = batch.all_responses()
        packed = await asyncio.to_thread(self._ranks.pack, sequences)
        with self._ranks.doing(f"scoring with the {'reference' if 'reference' in asked else 'policy'}"):
            return await self._ranks.scores(
                packed, len(sequences.scored), temperature=objective.temperature, **asked
            )
