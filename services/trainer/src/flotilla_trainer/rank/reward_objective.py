"""A reward model's loss on one micro-batch: rewards times the weights that the front made from the whole update.

Invariant: the weights are derivatives of the loss of the update by each reward, so this sum has its gradient; what the
loss itself is, the front knows.
"""

from __future__ import annotations

import torch

from flotilla_trainer.losses.terms import LossTerms, weighted_sum
from flotilla_trainer.rank.packed_row import PackedRow
from flotilla_trainer.rank.reward_model import RewardModel

Columns = dict[str, torch.Tensor]


class RewardObjective:
    """A weighted sum of rewards."""

    def on(self, model: RewardModel, columns: Columns, chunk_tokens: int) -> LossTerms:
        """What a micro-batch says; a head of one number needs no chunks."""
        rewards = model(columns["tokens"], columns["positions"], packed_row=PackedRow.among(columns))
        return self(rewards, columns)

    def __call__(self, rewards: torch.Tensor, columns: Columns) -> LossTerms:
        """The weighted sum over the answers of a micro-batch, and how many tokens they have."""
        loss = weighted_sum(columns["weights"], rewards)
        return LossTerms(loss, {"tokens": columns["answer_tokens"].sum(), "loss": loss.detach()}, {})
