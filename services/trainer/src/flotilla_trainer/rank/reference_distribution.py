"""The frozen reference beside the policy that trains, one micro-batch at a time.

Invariants: its weights are in the model only while its hidden states are made, before the policy's own forward pass;
its head is gathered once, by all ranks, and kept as long as the session.
"""

from __future__ import annotations

import torch

from flotilla_trainer.rank.frozen_copy import FrozenCopy
from flotilla_trainer.rank.packed_row import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.reference_states import ReferenceStates
from flotilla_trainer.rank.sharded_model import ShardedModel, gathered


class ReferenceDistribution:
    """Gives what the reference knows of micro-batches."""

    def __init__(self, model: ShardedModel, reference: FrozenCopy) -> None:
        self._model = model
        self._reference = reference
        self._head: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def on(self, columns: dict[str, torch.Tensor]) -> ReferenceStates:
        """The states of the scored tokens; a collective."""
        with torch.no_grad(), self._reference.in_place():
            if self._head is None:
                self._head = self._gathered_head()
            hidden = self._policy.hidden_states(
                columns["tokens"], columns["positions"], PackedRow.among(columns)
            )
        return ReferenceStates(hidden, *self._head)

    @property
    def _policy(self) -> PolicyModel:
        policy = self._model.policy
        assert isinstance(policy, PolicyModel), "the front compares distributions of policies alone"
        return policy

    def _gathered_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self._policy.causal_lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return self._whole(head.weight), None if bias is None else self._whole(bias)

    def _whole(self, parameter: torch.Tensor) -> torch.Tensor:
        # A copy in any case: where one rank holds all of it, the model takes its own numbers back when this ends.
        return gathered(parameter.detach()).to(self._model.dtype, copy=True)
