"""The value model as training sees it: token ids in, what reward is expected at given places out.

Invariants: a value is float32 and comes from the hidden state of the token before the one that it is about, so it knows
nothing of that one; the head is kept and applied in float32 whatever the body computes in.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from flotilla_trainer.rank.body_model import BodyModel
from flotilla_trainer.rank.packed_row import PackedRow
from flotilla_trainer.rank.value_body import ValueBody


class ValueModel(BodyModel):
    """A language model's body and one number a token."""

    @staticmethod
    def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel | ValueBody:
        """What is inside, without numbers."""
        return ValueBody.skeleton(config, dtype)

    @staticmethod
    def read(folder: Path) -> tuple[PreTrainedModel | ValueBody, set[str]]:
        """What a folder has of it, and the names of what it lacks; a head that it lacks is zero."""
        return ValueBody.read(folder)

    def in_float32(self) -> list[nn.Module]:
        """The parts that stay in float32 whatever the rest computes in."""
        return [self._head]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, *, packed_row: PackedRow | None = None
    ) -> torch.Tensor:
        """One value for each of the flattened `positions`."""
        if self._lane is None:
            return self._values(self._hidden(tokens, packed_row)[positions])
        part = self._lane.part(tokens, packed_row)
        own = part.own(positions)
        mine = self._values(self._hidden_part(part)[positions[own] - part.first])
        return self._lane.joined(mine, own, len(positions))

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        # A view of the module's output would lose FSDP's hook at the first operation in place.
        values: torch.Tensor = self._head(hidden.float())
        return values.squeeze(-1).clone()

    @property
    def _head(self) -> nn.Linear:
        head = self.causal_lm.score
        assert isinstance(head, nn.Linear), "skeletons without one are refused"
        return head
