"""Share one row among several ranks: each takes a part of the tokens, and in attention a part of the heads.

Invariants: parts are equally long, the last ones filled up with a sequence of their own that is never scored; every
rank of a lane calls the same exchanges in the same order; scores are joined before the loss, and each rank's gradient
flows through its own part alone, so that the sum over all ranks is the gradient of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from flotilla_trainer.rank.packed_rows import Heads, PackedRow, outside_graphs, packed_attention

SEQUENCE_PARALLEL_ATTENTION = "flotilla_lane"


@dataclass(frozen=True)
class RowPart:
    """The part of a row that one rank feeds."""

    tokens: torch.Tensor
    """The token ids of the part, [1, part]."""
    position_ids: torch.Tensor
    first: int
    """The index of the first of them within the row."""
    row: PackedRow
    """The whole row, with the sequence that fills it up."""

    def own(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices of those `positions` of the row that are in this part."""
        behind = positions - self.first
        return ((behind >= 0) & (behind < self.tokens.shape[1])).nonzero()[:, 0]


class SequenceParallel:
    """The exchanges of one rank with the other ranks of its lane."""

    def __init__(self, group: dist.ProcessGroup, place: int, width: int) -> None:
        self._group = group
        self._place = place
        self.width = width

    def part(self, tokens: torch.Tensor, row: PackedRow | None) -> RowPart:
        """Return this rank's part of a micro-batch; padded rows count as one row of equally long sequences."""
        lengths = row.lengths if row is not None else (tokens.shape[1],) * tokens.shape[0]
        filling = -tokens.numel() % self.width
        if filling or row is None:
            row = PackedRow.of((*lengths, filling) if filling else lengths, tokens.device)
        flat = nn.functional.pad(tokens.reshape(1, -1), (0, filling))
        size = flat.shape[1] // self.width
        first = self._place * size
        mine = slice(first, first + size)
        return RowPart(flat[:, mine], row.position_ids[:, mine], first, row)

    def joined(self, values: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` values of all ranks; those of this rank go to the indices `own`."""
        whole: torch.Tensor = _Joined.apply(values, own, count, self._group)  # type: ignore[no-untyped-call]
        return whole

    def by_heads(self, heads: Heads) -> Heads:
        """Exchange this rank's tokens of all heads for all tokens of its heads.

        Heads that do not divide among the ranks are repeated until they do.
        """
        copies = lcm(heads.shape[1], self.width) // heads.shape[1]
        # Query heads that share a key head stay next to each other.
        parts = heads[0].repeat_interleave(copies, 0) if copies > 1 else heads[0]
        exchanged = self._exchange(parts.unflatten(0, (self.width, -1)))
        return exchanged.transpose(0, 1).flatten(1, 2)[None]

    def by_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Return [1, part, all heads, size], from [1, tokens, this rank's heads, size]."""
        exchanged = self._exchange(output[0].unflatten(0, (self.width, -1)))
        return exchanged.transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        exchanged: torch.Tensor = _Exchanged.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchanged(torch.autograd.Function):
    """Sends part i to rank i and puts the part of rank i in its place; the gradient takes the same way."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradient, ctx.group), None


class _Joined(torch.autograd.Function):
    """Joins the values of all ranks; each rank gets the gradient of its own values."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, own: torch.Tensor, count: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros((count, *values.shape[1:]))
        whole[own] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient[own], None, None, None


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


@outside_graphs
def sequence_parallel_attention(
    module: nn.Module,
    query: Heads,
    key: Heads,
    value: Heads,
    attention_mask: torch.Tensor | None,
    *,
    packed_row: PackedRow,
    lane: SequenceParallel,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, part, heads, size] of causal attention within the sequences of the whole row."""
    query, key, value = (lane.by_heads(heads) for heads in (query, key, value))
    output, _ = packed_attention(module, query, key, value, None, packed_row=packed_row, **options)
    return lane.by_tokens(output), None


AttentionInterface.register(SEQUENCE_PARALLEL_ATTENTION, sequence_parallel_attention)
