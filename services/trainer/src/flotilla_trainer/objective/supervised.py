"""Given answers, learned token by token: the objective of `sft`, and of calls whose loss is `sft`.

Invariants: every trained token counts the same; an update changes nothing here and needs nothing beside its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms import counted_units
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.base import WithoutAdvantages
from flotilla_trainer.objective.policy_columns import TOKEN_MEAN, part_weights


class SupervisedObjective(WithoutAdvantages):
    """Raises the log-probabilities of given answers."""

    unit = "tokens"
    """The unit over which its losses are averaged."""
    writes_samples = True
    """The versions of their tokens are versions of the model that learns."""
    temperature = 1.0
    """Answers are scored by the unchanged distribution of the policy."""

    def scores_reference(self, batch: UpdateBatch) -> bool:
        """Return False: answers are compared with nothing."""
        return False

    def scores_policy(self, *, several_steps: bool) -> bool:
        """Return False: answers are learned whatever the policy makes of them."""
        return False

    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: NDArray[np.float32] | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Make sequences with the weights of their tokens, each part with its own denominator; there are no metrics."""
        return batch.sequences({"weights": part_weights(TOKEN_MEAN, batch, batch.trained, parts)}), {}

    def units(self, batch: UpdateBatch) -> float:
        """Count the tokens of a batch."""
        return counted_units(TOKEN_MEAN, batch.response_lengths, batch.trained)

    def metric_weight(self, batch: UpdateBatch) -> float:
        """Return the number of trained tokens, over which the metrics of a batch are averaged."""
        return float(batch.trained.sum())
