"""An update as the ranks get it: checked, scored where the objective asks for it, laid out.

Invariant: nothing of the session changes while an update is prepared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core import ids
from flotilla_core.version import Version
from flotilla_trainer.frames import Array
from flotilla_trainer.objective.session_objective import SessionObjective
from flotilla_trainer.packing import MicroBatch, fed_tokens, padding_share
from flotilla_trainer.session_ranks import SessionRanks
from flotilla_trainer.update_batch import UpdateBatch


@dataclass(frozen=True)
class PreparedUpdate:
    """What goes to the ranks, and what it says about itself."""

    batch: UpdateBatch
    packed: list[list[MicroBatch]]
    facts: dict[str, float]
    """Metrics of the objective, means over the trained tokens or the pairs of the batch."""
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
        self, update_id: str, groups: Sequence[pb.TrainGroup], version: Version, objective: SessionObjective
    ) -> PreparedUpdate:
        """The update of `version` on these groups."""
        writer = version if objective.writes_samples else None
        batch = await asyncio.to_thread(UpdateBatch.read, groups, self._ranks.limits, writer)
        if objective.scores_reference(batch):
            scores = await self._logprobs(batch, objective, reference=True)
            batch = replace(batch, reference_logprobs=scores)
        policy = await self._logprobs(batch, objective, reference=False) if objective.needs_policy else None

        def lay_out() -> PreparedUpdate:
            sequences, facts = objective.sequences(batch, self._shuffle_seed(update_id), policy)
            counts = bool(sequences.columns["weights"].any())
            return PreparedUpdate(batch, self._ranks.pack(sequences), facts, counts)

        return await asyncio.to_thread(lay_out)

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
