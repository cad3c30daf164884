"""A transformer as far as its last hidden states: token ids in, one vector a token out.

Invariants: tokens come as rows padded on the right, where a causal model cannot see it, or as one packed row with its
borders; either way no mask is built; no dropout, because rollouts and training must agree. The ranks of a lane get the
same micro-batch and give the same answers, each having computed a part of them. What is made of the hidden states is
the heirs', within their own forward, so that sharded parameters are whole when they are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flotilla_trainer.rank.packed_attention import PACKED_ATTENTION
from flotilla_trainer.rank.packed_row import PackedRow
from flotilla_trainer.rank.sequence_lane import LANE_ATTENTION, RowPart, SequenceLane
from flotilla_trainer.rank.value_body import ValueBody

ROW_ATTENTION = "sdpa"


class BodyModel(nn.Module):
    """What models of all roles share."""

    causal_lm: PreTrainedModel | ValueBody

    def __init__(self, causal_lm: PreTrainedModel | ValueBody, lane: SequenceLane | None = None) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._lane = lane
        self.eval()

    def packing_errors(self, first: torch.Tensor, other: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """What packing does to `last`, as shares of its largest hidden state.

        How much it differs from `last` alone in a row, and how much it depends on which sequence lies before it.
        """
        row = PackedRow.of((len(first), len(last)), last.device)
        alone = self._hidden(last[None])
        after = [
            self._hidden(torch.cat([before, last])[None], row)[len(first) :] for before in (first, other)
        ]
        differences = torch.stack([(after[0] - alone).abs().max(), (after[0] - after[1]).abs().max()])
        return differences.float() / alone.abs().max()

    def lane_error(self, tokens: torch.Tensor) -> torch.Tensor:
        """What feeding only a part of a row of two sequences does to it, as a share of its largest hidden state."""
        assert self._lane is not None
        row = PackedRow.of((len(tokens) // 3, len(tokens) - len(tokens) // 3), tokens.device)
        whole = self._hidden(tokens[None], row)
        part = self._lane.part(tokens[None], row)
        own = whole[part.first : part.first + part.tokens.shape[1]]
        difference = (self._hidden_part(part)[: len(own)] - own).abs().max()
        return difference.float() / whole.abs().max()

    def _hidden(self, tokens: torch.Tensor, packed_row: PackedRow | None = None) -> torch.Tensor:
        attention, borders = ROW_ATTENTION, dict[str, Any]()
        if packed_row is not None:
            attention = PACKED_ATTENTION
            borders = {"position_ids": packed_row.position_ids, "packed_row": packed_row}
        return self._run(attention, tokens, borders)

    def _hidden_part(self, part: RowPart) -> torch.Tensor:
        given = {"position_ids": part.position_ids, "packed_row": part.row, "lane": self._lane}
        return self._run(LANE_ATTENTION, part.tokens, given)

    def _run(self, attention: str, tokens: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        if self.causal_lm.config._attn_implementation != attention:
            self.causal_lm.set_attn_implementation(attention)
        output = self.causal_lm.base_model(input_ids=tokens, use_cache=False, **given)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)
