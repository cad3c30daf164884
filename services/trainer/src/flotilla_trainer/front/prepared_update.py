"""An update as the ranks get it: checked, scored where the objective asks for it, laid out.

Invariant: nothing of the session changes while an update is prepared.
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
    """1 - 2 p + the sum of all p^2: p is the probability of a token, the sum is over the vocabulary."""
    return 1.0 - 2.0 * np.exp(logprobs.astype(np.float64)) + squares


@dataclass(frozen=True)
class PreparedUpdate:
    """What goes to the ranks, and what it says about itself."""

    batch: UpdateBatch
    packed: list[list[MicroBatch]]
    facts: dict[str, float]
    """Metrics of the objective, means over the trained tokens or the pairs of the batch."""
    steps: list[int]
    """Micro-batches of each optimizer step, which lie one after the other."""
    counts: bool = True
    """Whether anything of it can change a weight: an objective may leave out every group."""

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics that need no rank."""
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
        """The update of `version` on these groups, in as many steps as planned."""
        writer = version if objective.writes_samples else None
        batch = await asyncio.to_thread(UpdateBatch.read, groups, self._ranks.limits, writer)
        if objective.scores_reference(batch):
            scores = await self._logprobs(batch, objective, reference=True)
            batch = replace(batch, reference_logprobs=scores)
        asked = objective.scores_policy(several_steps=plan.several)
        policy = await self._own_scores(batch, objective) if asked else None
        if objective.scores_distributions(batch):
            batch = replace(batch, score_squares=await self._score_squares(batch, objective))

        def lay_out() -> PreparedUpdate:
            seed = self._shuffle_seed(update_id)
            sequences, facts = objective.sequences(batch, seed, policy, plan.parts(batch))
            steps = plan.steps(sequences, batch)
            packs = [self._ranks.pack(step) for step in steps or [sequences]]
            packed = [list(chain.from_iterable(of_rank)) for of_rank in zip(*packs, strict=True)]
            return PreparedUpdate(batch, packed, facts, [len(pack[0]) for pack in packs], bool(steps))

        return await asyncio.to_thread(lay_out)

    async def _own_scores(self, batch: UpdateBatch, objective: SessionObjective) -> Array:
        """What the model says of the batch before it learns from it."""
        if isinstance(objective, RewardUpdate):
            return await self._rewards(batch)
        return await self._logprobs(batch, objective, reference=False)

    async def _score_squares(self, batch: UpdateBatch, objective: SessionObjective) -> Array:
        """Squared length of the gradient of each token's log-probability by the logits, under the policy as it is."""
        sequences = batch.all_responses()
        packed = await asyncio.to_thread(self._ranks.pack, sequences)
        with self._ranks.doing("scoring with the policy"):
            scores = await self._ranks.scores(
                packed, len(sequences.scored), temperature=objective.temperature, squares=True
            )
        return score_squares(scores["logprobs"], scores["squares"])

    async def _rewards(self, batch: UpdateBatch) -> Array:
        """Of every answer, under the reward model as it is."""
        sequences = after_answers(batch)
        packed = await asyncio.to_thread(self._ranks.pack, sequences)
        with self._ranks.doing("scoring with the reward model"):
            scores = await self._ranks.values(packed, len(sequences.scored))
        return scores["values"]

    async def _logprobs(self, batch: UpdateBatch, objective: SessionObjective, *, reference: bool) -> Array:
        """Of every response token, under the policy as it is, or as the session started from it."""
        sequences = batch.all_responses()
        packed = await asyncio.to_thread(self._ranks.pack, sequences)
        with self._ranks.doing(f"scoring with the {'reference' if reference else 'policy'}"):
            scores = await self._ranks.scores(
                packed, len(sequences.scored), temperature=objective.temperature, reference=reference
            )
        return scores["logprobs"]

    def _shuffle_seed(self, update_id: str) -> int:
        """The same for an update and its repetition in a later lineage: run/lineage.step counts by its step."""
        return ids.derive_seed("shuffle", self._seed, update_id.rpartition("/")[2].rpartition(".")[2])
