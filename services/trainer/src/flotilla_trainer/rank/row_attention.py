"""Attention within the sequences of a packed row on a GPU: one operation for compilers, whose graphs serve every row.

The operation looks at the layout of a row when it runs, and chooses a kernel. Sequences of about one length go to the
dense kernel of cuDNN, which takes a little more than half the time of the other one on Hopper and later. It wants a
grid: as many rows as there are sequences, all of one length. Other sequences, and layers with a window, go to the
flash kernel for variable lengths. Invariants: a graph sees tensors of one rank and type, whatever the row is like;
each sequence lies at the beginning of its row of the grid, so that causal attention shows none of its tokens what
fills the row up; what fills it up gets no gradient and gives none. A grid is made only where it costs less than it
saves. cuDNN plans every size of grid anew, so sizes are rounded up to few, and only the first sizes of grids without
any filling are taken as they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

WORTH = 1.3
"""A grid may have so many times the pairs of tokens that the sequences have."""
LENGTH_STEP, LENGTH_PARTS, ROW_PARTS = 64, 16, 8
"""Lengths are rounded up to a multiple of 64, and of 1/16 of a power of two; rows to 1/8 of one."""
EXACT_SIZES = 32
"""The most sizes of grids without any filling that are not rounded up."""
MOST_HEAD_SIZE = 128
NEVER = 1e9
"""The normalizer of a token that no gradient belongs to: its share in everything is zero."""
TRIAL = (64, 64)
TRIAL_TOLERANCE = 0.05
NO_WAYS = 5
"""The length of the tensor that stands for the ways of a row without filling.

Compilers take sizes that are equal in the first row for equal in all, and make graphs of their own for 0 and 1.
"""

_exact_sizes: set[tuple[int, int]] = set()


@dataclass(frozen=True)
class Grid:
    """The size of a grid, and the places of a packed row's tokens in it."""

    rows: int
    length: int
    places: torch.Tensor | None = None
    """The token at each place of the grid, row by row; None where the packed row has the grid's order."""
    back: torch.Tensor | None = None
    """The place of each token; None likewise."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Grid | None:
        """Return the grid of sequences of these lengths, on the host; None where it would cost too much."""
        rows, length = len(lengths), max(lengths)
        if min(lengths) == length and _takes_exactly(rows, length):
            return cls(rows, length)
        return cls.filled_up(lengths)

    @classmethod
    def filled_up(cls, lengths: Sequence[int]) -> Grid | None:
        """Return the same with rows and length rounded up."""
        rows = _rounded_up(len(lengths), 1, ROW_PARTS)
        longest = _rounded_up(max(lengths), LENGTH_STEP, LENGTH_PARTS)
        if rows * longest**2 > WORTH * sum(length**2 for length in lengths):
            return None
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        back = torch.arange(len(lengths)).repeat_interleave(counts) * longest + within
        places = torch.zeros(rows * longest, dtype=torch.long)
        places[back] = torch.arange(len(back))
        return cls(rows, longest, places, back)


# A frozen class would be taken apart by compilers, which would then make a graph for every size.
@dataclass(eq=False)
class RowLayout:
    """The borders of the sequences in a packed row, and their grid: what kernels ask for."""

    numbers: torch.Tensor
    """The reach, rows and length of the grid, and whether it is filled up; on the host, for kernels are chosen by it.

    The reach is a power of two that no sequence is longer than. Rows are 0 where there is no grid.
    """
    borders: torch.Tensor
    """The first index of each sequence, and the end of the row: int32, [sequences + 1]."""
    ways: torch.Tensor
    """The way into a grid that is filled up, and behind it the way back."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, grid: Grid | None) -> RowLayout:
        """Return the layout of a row of sequences of these lengths."""
        reach = 1 << (max(lengths) - 1).bit_length()
        borders = torch.tensor([0, *lengths]).cumsum(0).int()
        size = (0, 0) if grid is None else (grid.rows, grid.length)
        ways = torch.zeros(NO_WAYS, dtype=torch.long)
        filled = 0
        if grid is not None and grid.places is not None and grid.back is not None:
            ways, filled = torch.cat([grid.places, grid.back]), 1
        return cls(torch.tensor([reach, *size, filled]), sent(borders, device), sent(ways, device))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of the operation."""
        return self.numbers, self.borders, self.ways


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device; the host goes on while a GPU copies."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def grid_of(lengths: Sequence[int], device: torch.device) -> Grid | None:
    """Return the grid of these sequences where this device has the kernel for it, and it is the faster one."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return Grid.of(lengths) if hopper and _tried(device) else None


@functools.cache
def _tried(device: torch.device) -> bool:
    """Return whether a first run gives what plain operations give."""
    rows, length, size = len(TRIAL), max(TRIAL), 64
    random = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(rows * length, heads, size, device=device, generator=random).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    )
    try:
        with torch.enable_grad():
            layout = RowLayout.of(TRIAL, device, Grid(rows, length))
            output = within_sequences(query, key, value, layout, None)
            found = [output, *torch.autograd.grad(output.sum(), (query, key, value))]
            heads = [tensor.unflatten(0, (rows, length)).transpose(1, 2) for tensor in (query, key, value)]
            plain = torch.nn.functional.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True
            )
            right = [
                plain.transpose(1, 2).flatten(0, 1),
                *torch.autograd.grad(plain.sum(), (query, key, value)),
            ]
        error = max(
            float(((f - r).float().norm() / r.float().norm()).detach())
            for f, r in zip(found, right, strict=True)
        )
    except (RuntimeError, TypeError, AttributeError) as failure:
        logger.warning("Attention goes without cuDNN, which is slower: %s", str(failure).partition("\n")[0])
        return False
    if not error < TRIAL_TOLERANCE:
        logger.warning("Attention goes without cuDNN, which is off by %.3g here", error)
    return error < TRIAL_TOLERANCE


def within_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: RowLayout,
    scale: float | None,
    window: int = 0,
) -> torch.Tensor:
    """Return causal attention within the sequences of a packed row, [tokens, heads, size] as the queries.

    A window other than 0 is how many tokens a query sees: itself and those before it.
    """
    output: torch.Tensor = row_attention(query, key, value, *layout.tensors, scale, window)[0]
    return output


@torch.library.custom_op("flotilla::row_attention", mutates_args=())
def row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    borders: torch.Tensor,
    ways: torch.Tensor,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the normalizers as [heads, tokens]."""
    grid = _grid_for(query, numbers, ways, window)
    if grid is None:
        output, normalizers = ragged_forward(query, key, value, borders, int(numbers[0]), scale, window)
        return output.contiguous(), normalizers
    on_grid = [_placed(part, grid) for part in (query, key, value)]
    output, normalizers = dense_forward(on_grid[0], on_grid[1], on_grid[2], scale)
    by_head = normalizers.transpose(0, 1).flatten(1)
    by_head = by_head.contiguous() if grid.back is None else by_head.index_select(1, grid.back)
    return _packed(output, grid), by_head


@row_attention.register_fake
def _(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    return output, query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("flotilla::row_attention_backward", mutates_args=())
def row_attention_backward(
    slope: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizers: torch.Tensor,
    numbers: torch.Tensor,
    borders: torch.Tensor,
    ways: torch.Tensor,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients by queries, keys and values."""
    slope = slope.contiguous()
    grid = _grid_for(query, numbers, ways, window)
    if grid is None:
        reach = int(numbers[0])
        gradients = ragged_backward(
            slope, query, key, value, output, normalizers, borders, reach, scale, window
        )
        by_query, by_key, by_value = (gradient.contiguous() for gradient in gradients)
        return by_query, by_key, by_value
    if grid.back is not None:
        # What fills the grid up has no gradient, and a normalizer that leaves it no share.
        everywhere = slope.new_zeros(grid.rows * grid.length, *slope.shape[1:])
        slope = everywhere.index_copy_(0, grid.back, slope)
        never = normalizers.new_full((len(normalizers), grid.rows * grid.length), NEVER)
        normalizers = never.index_copy_(1, grid.back, normalizers)
    on_grid = [_placed(part, grid) for part in (query, key, value, output)]
    gradients = dense_backward(
        _placed(slope, Grid(grid.rows, grid.length)),
        on_grid[0],
        on_grid[1],
        on_grid[2],
        on_grid[3],
        normalizers.unflatten(1, (grid.rows, grid.length)).transpose(0, 1).contiguous(),
        scale,
    )
    by_query, by_key, by_value = (_packed(gradient, grid) for gradient in gradients)
    return by_query, by_key, by_value


@row_attention_backward.register_fake
def _(
    slope: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    by_query, by_key, by_value = (
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in (query, key, value)
    )
    return by_query, by_key, by_value


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # torch calls it
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.rest = scale, window


def _backward(ctx, slope, _):  # type: ignore[no-untyped-def]  # torch calls it
    return *row_attention_backward(slope, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


row_attention.register_autograd(_backward, setup_context=_keep)


def ragged_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    reach: int,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output as the queries, and the normalizers as [heads, tokens]."""
    found = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        borders,
        borders,
        reach,
        reach,
        0.0,
        not window,
        False,
        scale=scale,
        **_seen(window),
    )
    return found[0], found[1]


def ragged_backward(
    slope: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizers: torch.Tensor,
    borders: torch.Tensor,
    reach: int,
    scale: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients by queries, keys and values, shaped as they are."""
    by_query, by_key, by_value = torch.ops.aten._flash_attention_backward(
        slope,
        query,
        key,
        value,
        output,
        normalizers,
        borders,
        borders,
        reach,
        reach,
        0.0,
        not window,
        _no_dropout(query.device, torch.uint64, 2),
        slope.new_empty(0),
        scale=scale,
        **_seen(window),
    )
    return by_query, by_key, by_value


def _seen(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0}


def dense_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the normalizers as [rows, heads, length]."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return found[0], found[1].reshape(query.shape[:3])


def dense_backward(
    slope: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizers: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients by queries, keys and values, shaped as they are."""
    length, nothing = query.shape[2], _no_dropout(query.device, torch.long)
    by_query, by_key, by_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        slope,
        query,
        key,
        value,
        output,
        normalizers[..., None],
        nothing,
        nothing,
        None,
        None,
        None,
        length,
        length,
        0.0,
        True,
        scale=scale,
    )
    return by_query, by_key, by_value


@functools.cache
def _no_dropout(device: torch.device, dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Return the seed of a dropout that there is not."""
    return torch.zeros(size, dtype=dtype, device=device)


def _grid_for(query: torch.Tensor, numbers: torch.Tensor, ways: torch.Tensor, window: int) -> Grid | None:
    _, rows, length, filled = numbers.tolist()
    if not rows or window or query.shape[-1] > MOST_HEAD_SIZE:
        return None
    places, back = ways.split([rows * length, len(query)]) if filled else (None, None)
    return Grid(rows, length, places, back)


def _placed(part: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return [tokens, heads, size] as [rows, heads, length, size]."""
    on_grid = part if grid.places is None else part.index_select(0, grid.places)
    placed: torch.Tensor = on_grid.unflatten(0, (grid.rows, grid.length)).transpose(1, 2)
    return placed


def _packed(part: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return [rows, heads, length, size] as [tokens, heads, size]."""
    flat: torch.Tensor = part.transpose(1, 2).flatten(0, 1)
    packed: torch.Tensor = flat.contiguous() if grid.back is None else flat.index_select(0, grid.back)
    return packed


def _takes_exactly(rows: int, length: int) -> bool:
    """Return whether a grid of this size needs no rounding; every size makes cuDNN plan anew."""
    if (rows, length) not in _exact_sizes and len(_exact_sizes) >= EXACT_SIZES:
        return False
    _exact_sizes.add((rows, length))
    return True


def _rounded_up(count: int, step: int, parts: int) -> int:
    """Return the next multiple of `step`, and of a power of two that is about 1/`parts` of the count."""
    step = max(step, (1 << count.bit_length()) // (2 * parts))
    return -(-count // step) * step
