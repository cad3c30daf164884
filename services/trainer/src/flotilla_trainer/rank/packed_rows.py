"""Pack several sequences into one row, with attention inside each of them, through the interface of transformers.

Invariants: positions restart at zero with every sequence, so that a model cannot tell a packed sequence from a lone
one; no token sees another sequence, by construction and not by a mask over the whole row; memory grows with the tokens
and, at most, the square of one sequence. Half precision on GPUs uses cuDNN's dense kernel where the sequences have
about one length, and else torch's variable-length kernel where torch has it; compiled layers call both within their
graph. Everything else uses the dense kernels, one call for each run of equally long sequences, outside of graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from flotilla_trainer.rank.grid_attention import MOST_HEAD_SIZE, Grid, attention_on_grid, grid_works, sent

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
    """Several sequences in one row, and their borders: on the host for shapes, on the device for kernels."""

    lengths: tuple[int, ...]
    reach: int
    """A power of two that no sequence is longer than; kernels need no closer limit, and graphs serve few of them."""
    borders: torch.Tensor
    """The first index of each sequence, and the end of the row: int32, [sequences + 1]."""
    position_ids: torch.Tensor
    """The index of each token within its sequence, [1, tokens]."""
    grid: Grid | None = None
    """The grid of a kernel for sequences of about one length, where that is faster here."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRow:
        """Return a row of sequences of these lengths."""
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        starts = ends - counts
        places = torch.arange(int(ends[-1])) - starts.repeat_interleave(counts)
        borders = torch.nn.functional.pad(ends, (1, 0)).int()
        reach = 1 << (int(counts.max()) - 1).bit_length()
        grid = Grid.of(lengths) if grid_works(device) else None
        return cls(
            tuple(counts.tolist()),
            reach,
            sent(borders, device),
            sent(places[None], device),
            None if grid is None else grid.on(device),
        )

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
    grid = None if packed_row is None or sliding_window else packed_row.grid
    if grid is not None and takes_grid(query):
        given = [heads[0].transpose(0, 1) for heads in (query, key, value)]
        return attention_on_grid(given[0], given[1], given[2], grid, scaling)[None], None
    if packed_row is not None and takes_variable_lengths(query):
        return _at_once(query, key, value, packed_row, scaling, sliding_window), None
    return _by_runs(query, key, value, packed_row, scaling, sliding_window), None


def takes_grid(query: Heads) -> bool:
    """Return whether the kernel for grids can take these numbers."""
    return query.is_cuda and query.dtype in HALVES and query.shape[-1] <= MOST_HEAD_SIZE


def takes_variable_lengths(query: Heads) -> bool:
    """Return whether torch's variable-length kernel can take these numbers."""
    return VARIABLE_LENGTH is not None and query.is_cuda and query.dtype in HALVES


def _at_once(
    query: Heads, key: Heads, value: Heads, row: PackedRow, scaling: float | None, window: int | None
) -> torch.Tensor:
    assert VARIABLE_LENGTH is not None
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if NAMES_GROUPED_HEADS else {}
    return VARIABLE_LENGTH(
        query,
        key,
        value,
        row.borders,
        row.borders,
        row.reach,
        row.reach,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        **grouped,
    )[None]


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


def _variable_length_kernel() -> Callable[..., torch.Tensor] | None:
    """Return torch's kernel if this release of torch has one that takes a scale and a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys():
        return None
    # It returns a pair only where `return_aux` asks for one.
    return cast(Callable[..., torch.Tensor], varlen_attn)


VARIABLE_LENGTH = _variable_length_kernel()
# Releases without this option accept fewer key heads than query heads without it.
NAMES_GROUPED_HEADS = (
    VARIABLE_LENGTH is not None and "enable_gqa" in inspect.signature(VARIABLE_LENGTH).parameters
)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
