"""Pack several sequences into one row, with attention inside each of them, through the interface of transformers.

Invariants: positions restart at zero with every sequence, so that a model cannot tell a packed sequence from a lone
one; no token sees another sequence, by construction and not by a mask over the whole row; memory grows with the tokens
and, at most, the square of one sequence. Half precision on GPUs is one operation, which compiled layers have in their
graph. Everything else uses the dense kernels, one call for each run of equally long sequences, outside of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from flotilla_trainer.rank.row_attention import RowLayout, grid_of, sent, within_sequences

PACKED_ATTENTION = "flotilla_packed"
HALVES = (torch.bfloat16, torch.float16)

Heads = torch.Tensor
"""A tensor of [1, heads, tokens, size]."""
Attention = TypeVar("Attention", bound=Callable[..., Any])
outside_graphs: Callable[[Attention], Attention] = torch.compiler.disable
"""Keeps a function out of compiled graphs; torch's own decorator has no types."""


# A frozen class would be taken apart by compilers, which would then make a graph for every list of lengths.
@dataclass(eq=False)
class PackedRow:
    """Several sequences in one row: their lengths on the host, their layout for kernels."""

    lengths: tuple[int, ...]
    layout: RowLayout
    position_ids: torch.Tensor
    """The index of each token within its sequence, [1, tokens]."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRow:
        """Return a row of sequences of these lengths."""
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        places = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        known = tuple(counts.tolist())
        layout = RowLayout.of(known, device, grid_of(known, device))
        return cls(known, layout, sent(places[None], device))

    @classmethod
    def among(cls, columns: dict[str, torch.Tensor]) -> PackedRow | None:
        """Return the row that the columns of a micro-batch describe; None where its rows are padded."""
        lengths = columns.get("packed_lengths")
        return None if lengths is None else cls.of(lengths.tolist(), columns["tokens"].device)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return runs of equally long sequences, one dense call each, as (first token, sequences, length)."""
        runs, start = [], 0
        for length, neighbours in groupby(self.lengths):
            count = len(list(neighbours))
            runs.append((start, count, length))
            start += count * length
        return runs


def packed_attention(
    module: nn.Module,
    query: Heads,
    key: Heads,
    value: Heads,
    attention_mask: torch.Tensor | None,
    *,
    packed_row: PackedRow | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, tokens, heads, size] of causal attention within the sequences of the row.

    A model that does not pass the row on gets attention over the whole row, which the probe of the model finds.
    """
    if packed_row is not None and takes_rows(query):
        given = [heads[0].transpose(0, 1) for heads in (query, key, value)]
        window = sliding_window or 0
        output = within_sequences(given[0], given[1], given[2], packed_row.layout, scaling, window)
        return output[None], None
    return _by_runs(query, key, value, packed_row, scaling, sliding_window), None


def takes_rows(query: Heads) -> bool:
    """Return whether the operation for packed rows can take these numbers."""
    return query.is_cuda and query.dtype in HALVES


@outside_graphs
def _by_runs(
    query: Heads, key: Heads, value: Heads, row: PackedRow | None, scaling: float | None, window: int | None
) -> torch.Tensor:
    runs = [(0, 1, query.shape[2])] if row is None else row.runs()
    outputs = [
        _run(query, key, value, start, count, length, scaling, window) for start, count, length in runs
    ]
    return torch.cat(outputs)[None]


def _run(
    query: Heads,
    key: Heads,
    value: Heads,
    start: int,
    count: int,
    length: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return [tokens, heads, size] for `count` consecutive sequences of `length` tokens each."""
    query, key, value = (
        heads[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
        for heads in (query, key, value)
    )
    mask = _band(length, window, query.device) if window and window < length else None
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the mask of the keys that a query sees: itself and the `window` - 1 before it."""
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
