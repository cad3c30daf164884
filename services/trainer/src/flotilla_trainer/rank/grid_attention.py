"""Attention over a packed row whose sequences have about the same length, by cuDNN's dense kernel.

On Hopper and later this kernel takes a little more than half the time of the variable-length one. It wants a grid: as
many rows as there are sequences, all of one length. Invariants: each sequence lies at the beginning of its row, so that
causal attention shows none of its tokens what fills the row up; what fills it up gets no gradient and gives none. A
grid is made only where it costs less than it saves. cuDNN plans every size of grid anew, so sizes are rounded up to
few, and only the first sizes of rows without any filling are taken as they are. The whole is one operation for
compilers, whose graphs then serve grids of all sizes.
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
TRIAL = (2, 64, 64)
TRIAL_TOLERANCE = 0.05

_exact_sizes: set[tuple[int, int]] = set()


# A frozen class would be taken apart by compilers, which would then make a graph for every size.
@dataclass(eq=False)
class Grid:
    """The places of a packed row's tokens in a grid."""

    size: torch.Tensor
    """Rows and length; on the host, because kernels are chosen by it."""
    places: torch.Tensor | None
    """The token at each place of the grid, row by row; None where the packed row has the grid's order."""
    back: torch.Tensor | None
    """The place of each token; None likewise."""

    @property
    def ways(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The way into the grid, and the way back."""
        return self.places, self.back

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Grid | None:
        """Return the grid of sequences of these lengths, on the host; None where it would cost too much."""
        rows, length = len(lengths), max(lengths)
        if min(lengths) == length and _takes_exactly(rows, length):
            return cls(torch.tensor([rows, length]), None, None)
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
        return cls(torch.tensor([rows, longest]), places, back)

    def on(self, device: torch.device) -> Grid:
        """Return the grid with its ways on a device; the host goes on while a GPU copies."""
        return Grid(self.size, *(None if way is None else sent(way, device) for way in self.ways))


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device; the host goes on while a GPU copies."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def grid_works(device: torch.device) -> bool:
    """Return whether this device has the kernel, and it is the faster one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 and _tried(device)


@functools.cache
def _tried(device: torch.device) -> bool:
    """Return whether a first run gives what plain operations give."""
    rows, length, size = TRIAL
    random = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(rows * length, heads, size, device=device, generator=random).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    )
    try:
        with torch.enable_grad():
            output = attention_on_grid(
                query, key, value, Grid(torch.tensor([rows, length]), None, None), None
            )
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


def attention_on_grid(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: Grid, scale: float | None
) -> torch.Tensor:
    """Return causal attention within the sequences of a packed row, [tokens, heads, size] as the queries."""
    output: torch.Tensor = grid_attention(query, key, value, grid.size, grid.places, grid.back, scale)[0]
    return output


@torch.library.custom_op("flotilla::grid_attention", mutates_args=())
def grid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    size: torch.Tensor,
    places: torch.Tensor | None,
    back: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the normalizers of the tokens by head."""
    on_grid = [_placed(part, size, places) for part in (query, key, value)]
    output, normalizers = dense_forward(on_grid[0], on_grid[1], on_grid[2], scale)
    by_head = normalizers.transpose(0, 1).flatten(1)
    return _packed(output, back), by_head.contiguous() if back is None else by_head.index_select(1, back)


@grid_attention.register_fake
def _(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    return output, query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("flotilla::grid_attention_backward", mutates_args=())
def grid_attention_backward(
    slope: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizers: torch.Tensor,
    size: torch.Tensor,
    places: torch.Tensor | None,
    back: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients by queries, keys and values."""
    rows, length = size.tolist()
    slope = slope.contiguous()
    if back is not None:
        # What fills the grid up has no gradient, and a normalizer that leaves it no share.
        slope = slope.new_zeros(rows * length, *slope.shape[1:]).index_copy_(0, back, slope)
        everywhere = normalizers.new_full((len(normalizers), rows * length), NEVER)
        normalizers = everywhere.index_copy_(1, back, normalizers)
    on_grid = [_placed(part, size, places) for part in (query, key, value, output)]
    gradients = dense_backward(
        _placed(slope, size, None),
        on_grid[0],
        on_grid[1],
        on_grid[2],
        on_grid[3],
        normalizers.unflatten(1, (rows, length)).transpose(0, 1).contiguous(),
        scale,
    )
    by_query, by_key, by_value = (_packed(gradient, back) for gradient in gradients)
    return by_query, by_key, by_value


@grid_attention_backward.register_fake
def _(
    slope: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    by_query, by_key, by_value = (
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in (query, key, value)
    )
    return by_query, by_key, by_value


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # torch calls it
    query, key, value, size, places, back, scale = inputs
    ctx.save_for_backward(query, key, value, *output, size, places, back)
    ctx.scale = scale


def _backward(ctx, slope, _):  # type: ignore[no-untyped-def]  # torch calls it
    query, key, value, output, normalizers, size, places, back = ctx.saved_tensors
    gradients = grid_attention_backward(
        slope, query, key, value, output, normalizers, size, places, back, ctx.scale
    )
    return *gradients, None, None, None, None


grid_attention.register_autograd(_backward, setup_context=_keep)


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
    length, nothing = query.shape[2], _no_dropout(query.device)
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
def _no_dropout(device: torch.device) -> torch.Tensor:
    """Return the seed of a dropout that there is not."""
    return torch.zeros((), dtype=torch.long, device=device)


def _placed(part: torch.Tensor, size: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """Return [tokens, heads, size] as [rows, heads, length, size]."""
    rows, length = size.tolist()
    on_grid = part if places is None else part.index_select(0, places)
    placed: torch.Tensor = on_grid.unflatten(0, (rows, length)).transpose(1, 2)
    return placed


def _packed(part: torch.Tensor, back: torch.Tensor | None) -> torch.Tensor:
    """Return [rows, heads, length, size] as [tokens, heads, size]."""
    flat: torch.Tensor = part.transpose(1, 2).flatten(0, 1)
    packed: torch.Tensor = flat.contiguous() if back is None else flat.index_select(0, back)
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
