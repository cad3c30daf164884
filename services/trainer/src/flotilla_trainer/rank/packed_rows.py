"""Several sequences one after the other in one row, and attention inside each of them, as transformers calls it.

Invariants: positions restart at zero with every sequence, so that a model cannot tell a packed sequence from a lone
one; no token sees another sequence, by construction and not by a mask over the whole row; memory grows with the tokens
and, at most, the square of one sequence. Half precision on GPUs takes torch's variable-length kernel where torch has
it; everything else takes the dense kernels, one call for each run of equally long sequences.
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

PACKED_ATTENTION = "flotilla_packed"
HALVES = (torch.bfloat16, torch.float16)

Heads = torch.Tensor
"""[1, heads, tokens, size]."""
Attention = TypeVar("Attention", bound=Callable[..., Any])
outside_graphs: Callable[[Attention], Attention] = torch.compiler.disable
"""For attention that no compiler may look into; torch gives it no types."""


@dataclass(frozen=True)
class PackedRow:
    """Several sequences one after the other in one row, and where each of them lies.

    Borders of the sequences of one row, on the host for shapes and on the device for kernels.
    """

    lengths: tuple[int, ...]
    borders: torch.Tensor
    """[sequences + 1] where each sequence begins, and the end, as int32."""
    position_ids: torch.Tensor
    """[1, tokens] place of each token within its sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRow:
        """A row of sequences of these lengths."""
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        starts = ends - counts
        places = torch.arange(int(ends[-1])) - starts.repeat_interleave(counts)
        borders = torch.nn.functional.pad(ends, (1, 0)).int()
        return cls(tuple(counts.tolist()), borders.to(device), places[None].to(device))

    @classmethod
    def among(cls, columns: dict[str, torch.Tensor]) -> PackedRow | None:
        """The row that the columns of a micro-batch describe; None where its rows are padded."""
        lengths = columns.get("packed_lengths")
        return None if lengths is None else cls.of(lengths.tolist(), columns["tokens"].device)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbours of equal length as (first token, sequences, length), which one dense call can take together."""
        runs, start = [], 0
        for length, neighbours in groupby(self.lengths):
            count = len(list(neighbours))
            runs.append((start, count, length))
            start += count * length
        return runs


@outside_graphs
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
    """[1, tokens, heads, size] of causal attention within the sequences of the row.

    A model that does not hand the row down gets attention over the whole row, which the probe of the model finds.
    """
    if packed_row is None:
        packed_row = PackedRow.of((query.shape[2],), query.device)
    if VARIABLE_LENGTH is not None and query.is_cuda and query.dtype in HALVES:
        return _at_once(VARIABLE_LENGTH, query, key, value, packed_row, scaling, sliding_window), None
    outputs = [
        _run(query, key, value, start, count, length, scaling, sliding_window)
        for start, count, length in packed_row.runs()
    ]
    return torch.cat(outputs)[None], None


def _at_once(
    kernel: Callable[..., torch.Tensor],
    query: Heads,
    key: Heads,
    value: Heads,
    row: PackedRow,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if NAMES_GROUPED_HEADS else {}
    return kernel(
        query,
        key,
        value,
        row.borders,
        row.borders,
        row.longest,
        row.longest,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        **grouped,
    )[None]


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
    """[tokens, heads, size] of `count` neighbours of `length` tokens each."""
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
    """Which keys a query sees: itself and the `window` - 1 before it."""
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window)


def _variable_length_kernel() -> Callable[..., torch.Tensor] | None:
    """Torch's kernel, from the release on in which it takes a scale and a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys():
        return None
    # It gives a pair only where `return_aux` asks for one.
    return cast(Callable[..., torch.Tensor], varlen_attn)


VARIABLE_LENGTH = _variable_length_kernel()
# Releases that do not name the option take fewer key heads than query heads as they come.
NAMES_GROUPED_HEADS = (
    VARIABLE_LENGTH is not None and "enable_gqa" in inspect.signature(VARIABLE_LENGTH).parameters
)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
