"""A 64-bit digest of a tensor's bytes, computed where the tensor lives.

Invariants: equal bytes give an equal digest on every device and torch release; a changed byte, two swapped elements,
swapped rows or a shorter tensor change it (a random difference goes unseen once in 2^32 or rarer). It guards against
faults, not against an adversary. Only integer operations that wrap are used, so there is no rounding to disagree about.

Definition, all modulo 2^64: the bytes, padded with zeros, are little-endian words x cut into blocks of 2^15; a block's
sum is s = sum(x[i] * A[i] + (x[i] >> 32) * B[i]) with an arithmetic shift; A, B are splitmix64 streams; the digest is
mix(sum over blocks k of mix(s + k * GOLDEN) + nbytes). The second term catches swaps of words that differ in high bits
only, which the first term alone would miss.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

BLOCK_WORDS = 1 << 15
WORD_BYTES = 8
GOLDEN = 0x9E3779B97F4A7C15
CHUNK_BLOCKS = {"cpu": 1, "cuda": 256}
"""Blocks that are digested at once: one stays in a CPU's cache, many keep a GPU busy with bounded scratch memory."""


def tensor_digest(tensor: torch.Tensor) -> int:
    """Digest of one tensor as an unsigned 64-bit number; waits for its device."""
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Digests of many tensors with one wait for the device at the end."""
    return resolve([pending_digest(tensor) for tensor in tensors])


def resolve(pending: list[torch.Tensor]) -> list[int]:
    """Fetch digests that were queued on a device."""
    if not pending:
        return []
    return [value % (1 << 64) for value in torch.stack(pending).tolist()]


@torch.no_grad()
def pending_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digest as a 0-d int64 tensor on the tensor's device; the work is only queued on a GPU."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    low, high = _coefficients(data.device)
    per_chunk = CHUNK_BLOCKS.get(data.device.type, 1) * BLOCK_WORDS * WORD_BYTES
    sums = [
        _block_sums(data[start : start + per_chunk], low, high) for start in range(0, data.numel(), per_chunk)
    ]
    blocks = torch.cat(sums)
    positions = torch.arange(blocks.numel(), device=blocks.device) * _signed(GOLDEN)
    return _mix(_mix(blocks + positions).sum() + data.numel())


def _block_sums(data: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    block_bytes = BLOCK_WORDS * WORD_BYTES
    if data.numel() % block_bytes or data.data_ptr() % WORD_BYTES:
        padded = data.new_zeros(-(-data.numel() // block_bytes) * block_bytes)
        padded[: data.numel()].copy_(data)
        data = padded
    words = data.view(torch.int64).view(-1, BLOCK_WORDS)
    return (words * low).addcmul_(words >> 32, high).sum(dim=1)


@cache
def _coefficients(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    counter = torch.arange(1, 2 * BLOCK_WORDS + 1, dtype=torch.int64) * _signed(GOLDEN)
    both = _mix(counter).to(device)
    return both[:BLOCK_WORDS], both[BLOCK_WORDS:]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of splitmix64."""
    x = (x ^ _logical_shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
