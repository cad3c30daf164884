"""The weights that a session started from: put in place to score what the policy has become, or beside it as it trains.

Invariants: every rank keeps its own shards and nothing is gathered but the head, once, by all ranks, and kept as long
as the session; of a frozen model only the adapters are kept, for nothing else changes; the reference's weights are in
the model only while it scores or its hidden states are made, before the policy's own forward pass, and the model holds
the policy again whenever `in_place` is left, bit by bit, whatever happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel, ReferenceStates
from flotilla_trainer.rank.sharded_model import ShardedModel, gathered, local


class ReferenceWeights:
    """A copy of this rank's shards, taken when it is made."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._shards = [local(parameter).detach().clone() for parameter in model.trainable().values()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the copy meanwhile, and the copy the policy."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for parameter, shard in zip(self._model.trainable().values(), self._shards, strict=True):
                mine = local(parameter)
                held = mine.clone()
                mine.copy_(shard)
                shard.copy_(held)


class ReferenceDistribution:
    """The frozen reference beside the policy that trains, one micro-batch at a time.

    Gives what the reference knows of micro-batches.
    """

    def __init__(self, model: ShardedModel, reference: ReferenceWeights) -> None:
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
