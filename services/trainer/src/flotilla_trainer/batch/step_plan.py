"""Plan the optimizer steps of an update: mini-batches of whole groups, in one pass over them or several.

Invariants: every group is in one mini-batch, and their sizes differ by one group at most; all passes are equal; a
mini-batch without a counted token is no step; an update with fewer groups than steps makes one step for each group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flotilla_core.config import OptimizerConfig
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.update_batch import UpdateBatch


@dataclass(frozen=True)
class StepPlan:
    """The number of mini-batches of an update, and of passes over them, that a session asks for."""

    mini_batches: int = 1
    epochs: int = 1

    @classmethod
    def of(cls, optimizer: OptimizerConfig) -> StepPlan:
        """Read the plan from the section."""
        return cls(optimizer.steps_per_update, optimizer.epochs_per_update)

    @property
    def several(self) -> bool:
        """Return whether an update may take more than one step."""
        return self.mini_batches * self.epochs > 1

    def parts(self, batch: UpdateBatch) -> list[NDArray[np.bool_]]:
        """Return a mask over all response tokens for each mini-batch."""
        samples = self._of_groups(len(batch.group_sizes)).repeat(batch.group_sizes)
        tokens = samples.repeat(batch.response_lengths)
        return [tokens == number for number in range(int(tokens[-1]) + 1)]

    def steps(self, sequences: Sequences, batch: UpdateBatch) -> list[Sequences]:
        """Return the sequences of each step, in order; mini-batches without a counted token are left out."""
        samples = self._of_groups(len(batch.group_sizes)).repeat(batch.group_sizes)
        edges = np.searchsorted(samples, np.arange(int(samples[-1]) + 2))
        cut = [sequences.between(first, last) for first, last in pairwise(edges.tolist())]
        steps = self.epochs * [part for part in cut if part.columns["weights"].any()]
        return [_at(step, number, len(steps)) for number, step in enumerate(steps)]

    def _of_groups(self, groups: int) -> NDArray[np.int64]:
        """Return the mini-batch of each group."""
        return np.arange(groups) * min(self.mini_batches, groups) // groups


def _at(step: Sequences, number: int, steps: int) -> Sequences:
    """Return the step with the columns that depend on its place among the steps of the update."""
    columns = dict(step.columns)
    if number == 0:
        # The first forward pass already runs the policy before the update. Log-probabilities of a separate pass would
        # differ by rounding, and the sign of that difference would become the gradient of a distance.
        columns.pop("proximal_logprobs", None)
    if "staleness" not in columns:
        return replace(step, columns=columns)
    columns["proximal_share"] = proximal_share(columns.pop("staleness"), number / steps)
    return replace(step, columns=columns)


def proximal_share(staleness: NDArray[np.float32], gone: float) -> NDArray[np.float32]:
    """Return how far the policy before the update is on the way from the sampling to the current policy: s / (s + d).

    s is the staleness of a token in updates, d the share of this update that is `gone`; the result is 1 at its start.
    """
    if not gone:
        return np.ones_like(staleness)
    return staleness / (staleness + np.float32(gone))
