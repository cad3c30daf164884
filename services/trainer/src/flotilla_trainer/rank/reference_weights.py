"""Keep the weights that a session started from, to score with them, or to compare distributions with them in training.

Invariants: every rank keeps its own shards; only the head is gathered, once, by all ranks, and kept as long as the
session; of a frozen model only the adapters are kept, because nothing else changes; the reference's weights are in the
model only while it scores or computes its hidden states, before the policy's own forward pass; when `in_place` is left,
the model holds the policy again bit by bit, whatever happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flotilla_trainer.rank.cut import gathered, local
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.parameter_offload import finish_transfers
from flotilla_trainer.rank.policy_model import PolicyModel, ReferenceStates
from flotilla_trainer.rank.sharded_model import ShardedModel


class ReferenceWeights:
    """A copy of this rank's shards, made when this object is created."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._shards = [local(parameter).detach().clone() for parameter in model.trainable().values()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model hold the copy, and the copy hold the policy, inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        if self._model.cpu_offload:
            finish_transfers(self._model.device)
        with torch.no_grad():
            for parameter, shard in zip(self._model.trainable().values(), self._shards, strict=True):
                mine = local(parameter)
                held = mine.clone()
                mine.copy_(shard)
                shard.copy_(held)


class ReferenceDistribution:
    """Computes the states of the frozen reference for one micro-batch at a time, next to the policy that trains."""

    def __init__(self, model: ShardedModel, reference: ReferenceWeights) -> None:
        self._model = model
        self._reference = reference
        self._head: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def on(self, columns: dict[str, torch.Tensor]) -> ReferenceStates:
        """Return the states of the scored tokens; a collective."""
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
        # This must be a copy: with one rank the tensor is the model's own, whose numbers change back after the block.
        return gathered(parameter.detach()).to(self._model.dtype, copy=True)
