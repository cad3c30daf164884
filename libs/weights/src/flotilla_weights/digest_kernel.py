"""Digests of many tensors on a GPU, in three launches and one pass over their bytes.

Invariants: the numbers are those of `digest`, whose definition this follows; sums wrap and are therefore the same in
any order, so that the blocks of a tensor are added by atomics. Nothing here waits for the device. This module imports
Triton: it is imported only where a GPU is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCKS_OF_A_PROGRAM = 8
"""Blocks that share the coefficients which a program has read."""
WORDS_OF_A_PROGRAM = 512
MIXED_AT_ONCE = 256

_GOLDEN = tl.constexpr(-7046029254386353131)
_FIRST_FACTOR = tl.constexpr(-4658895280553007687)
_SECOND_FACTOR = tl.constexpr(-7723592293110705685)


class BlockTable:
    """The places of the blocks of some tensors, relative to the first byte of one of them."""

    def __init__(
        self, extents: Sequence[tuple[int, int]], block_bytes: int, low: torch.Tensor, high: torch.Tensor
    ) -> None:
        """`extents` are an offset and a size in bytes for each tensor; `low` and `high` are the coefficients."""
        offsets: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        for start, nbytes in extents:
            firsts.append(len(offsets))
            for begin in range(0, nbytes, block_bytes):
                offsets.append(start + begin)
                sizes.append(min(block_bytes, nbytes - begin))
        self._blocks = len(offsets)
        self._tensors = len(extents)
        self._block_bytes = block_bytes
        self._low, self._high = low, high
        starts, lengths = zip(*extents, strict=True)
        columns = [offsets, sizes, firsts, list(starts), list(lengths)]
        rows = [torch.tensor(column, dtype=torch.int64, device=low.device) for column in columns]
        self._offsets, self._sizes, self._firsts, self._starts, self._lengths = rows

    def digests(self, base: torch.Tensor) -> torch.Tensor:
        """Queue the digests of the tensors; `base` begins at the byte that offsets count from."""
        device = base.device
        sums = torch.zeros(self._blocks, dtype=torch.int64, device=device)
        digests = torch.empty(self._tensors, dtype=torch.int64, device=device)
        base = base.view(torch.uint8)
        words = self._block_bytes // 8
        _add_words[(words // WORDS_OF_A_PROGRAM, triton.cdiv(self._blocks, BLOCKS_OF_A_PROGRAM))](
            base,
            self._offsets,
            self._sizes,
            self._low,
            self._high,
            sums,
            self._blocks,
            WORDS=WORDS_OF_A_PROGRAM,
            BLOCKS=BLOCKS_OF_A_PROGRAM,
        )
        _mix_sums[(self._tensors,)](
            base,
            self._starts,
            self._lengths,
            self._firsts,
            self._low,
            self._high,
            sums,
            digests,
            BLOCK_BYTES=self._block_bytes,
            AT_ONCE=MIXED_AT_ONCE,
        )
        return digests


@triton.jit
def _add_words(base, offsets, sizes, low, high, sums, blocks, WORDS: tl.constexpr, BLOCKS: tl.constexpr):
    """Add to the sums of some blocks what some of their whole words contribute."""
    first_word = tl.program_id(0) * WORDS
    word = first_word + tl.arange(0, WORDS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    offset = tl.load(offsets + block, mask=block < blocks, other=0)
    whole_words = tl.load(sizes + block, mask=block < blocks, other=0) // 8
    places = (base + offset).to(tl.pointer_type(tl.int64))[:, None] + word[None, :]
    x = tl.load(places, mask=word[None, :] < whole_words[:, None], other=0)
    a = tl.load(low + word)[None, :]
    b = tl.load(high + word)[None, :]
    part = tl.sum(x * a + (x >> 32) * b, axis=1)
    tl.atomic_add(sums + block, part, mask=first_word < whole_words)


@triton.jit
def _mix_sums(
    base,
    starts,
    lengths,
    firsts,
    low,
    high,
    sums,
    digests,
    BLOCK_BYTES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Make the digest of one tensor from the sums of its blocks and from its bytes after the last whole word."""
    tensor = tl.program_id(0)
    nbytes = tl.load(lengths + tensor)
    whole = nbytes // 8
    byte = tl.arange(0, 8)
    rest = tl.load(
        base + tl.load(starts + tensor) + whole * 8 + byte, mask=byte < nbytes - whole * 8, other=0
    )
    x = tl.sum(rest.to(tl.int64) << (byte * 8).to(tl.int64), axis=0)
    word = whole % (BLOCK_BYTES // 8)
    tail = x * tl.load(low + word) + (x >> 32) * tl.load(high + word)

    count = (nbytes + BLOCK_BYTES - 1) // BLOCK_BYTES
    first = tl.load(firsts + tensor)
    total = tl.zeros([AT_ONCE], tl.int64)
    for start in range(0, count, AT_ONCE):
        k = start + tl.arange(0, AT_ONCE).to(tl.int64)
        block = tl.load(sums + first + k, mask=k < count, other=0) + tl.where(k == count - 1, tail, 0)
        total += tl.where(k < count, _mix(block + k * _GOLDEN), 0)
    tl.store(digests + tensor, _mix(tl.sum(total, axis=0) + nbytes))


@triton.jit
def _mix(x):
    """Apply the finaliser of splitmix64, whose shifts are logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST_FACTOR
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND_FACTOR
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
