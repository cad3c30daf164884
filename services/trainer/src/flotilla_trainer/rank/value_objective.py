"""A critic's loss on one micro-batch.

Invariants: weights hold the denominator of the whole update, so nothing is averaged here; a value that left the range
around the one that came with its token learns only where that makes its error smaller.
"""

from __future__ import annotations

import torch

from flotilla_trainer.losses.terms import LossTerms, weighted_sum
from flotilla_trainer.rank.packed_row import PackedRow
from flotilla_trainer.rank.value_model import ValueModel
from flotilla_trainer.wire.settings import ObjectiveSettings

Columns = dict[str, torch.Tensor]


class ValueObjective:
    """Half the squared distance from the returns, clipped around the old values."""

    def __init__(self, settings: ObjectiveSettings) -> None:
        self._clip: float | None = settings.parameters["clip"]

    def on(self, model: ValueModel, columns: Columns, chunk_tokens: int) -> LossTerms:
        """What a micro-batch says; a head of one number needs no chunks."""
        return self(
            model(columns["tokens"], columns["positions"], packed_row=PackedRow.among(columns)), columns
        )

    def __call__(self, values: torch.Tensor, columns: Columns) -> LossTerms:
        """The weighted sum over the tokens of a micro-batch, and what it says about itself."""
        returns, weights = columns["returns"], columns["weights"]
        losses = (values - returns).square()
        clipped = torch.zeros_like(losses, dtype=torch.bool)
        if self._clip is not None:
            old = columns["old_values"]
            bounded = (torch.clamp(values, old - self._clip, old + self._clip) - returns).square()
            clipped = bounded > losses
            losses = torch.maximum(losses, bounded)
        loss = 0.5 * weighted_sum(weights, losses)
        sums = {"tokens": torch.ones_like(losses).sum(), "clipped": clipped.sum(), "loss": loss.detach()}
        return LossTerms(loss, sums, {})
