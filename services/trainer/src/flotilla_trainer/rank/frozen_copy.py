"""The weights that a session started from, to score what the policy has become.

Invariants: every rank keeps its own shards and nothing is gathered; of a frozen model only the adapters are kept, for
nothing else changes; the model holds the policy again whenever `in_place` is left, bit by bit, whatever happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flotilla_trainer.rank.sharded_model import ShardedModel, local


class FrozenCopy:
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
