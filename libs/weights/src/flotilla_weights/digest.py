"""A 64-bit digest of a tensor's bytes, computed where the tensor lives.

Invariants: equal bytes give an equal digest on every device and torch release; a changed byte, two swapped elements,
swapped rows or a shorter tensor change it (a random difference goes unseen once in 2^32 or rarer). It guards against
faults, not against an adversary. Only integer operations that wrap are used, so there is no rounding to disagree about.

Definition, all modulo 2^64: the bytes, padded with zeros, are little-endian words x cut into blocks of 2^15; a block's
sum is s = sum(x[i] * A[i] + (x[i] >> 32) * B[i]) with an arithmetic shift; A, B are splitmix64 streams; the digest is
mix(sum over blocks k of mix(s + k * GOLDEN) + nbytes). The second term catches swaps of words that differ in high bits
only, which the first term alone would miss. Torch computes it on any device; on GPUs a kernel does, whose numbers are
compared with torch's before the first use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flotilla_weights.digest_kernel import BlockTable

log = logging.getLogger(__name__)

BLOCK_WORDS = 1 << 15
WORD_BYTES = 8
GOLDEN = 0x9E3779B97F4A7C15
CHUNK_BLOCKS = {"cpu": 1, "cuda": 256}
"""Blocks that are digested at once: one stays in a CPU's cache, many keep a GPU busy with bounded scratch memory."""
KNOWN_LAYOUTS = 4096
"""Arrangements of tensors in memory whose tables stay on the GPU: those of all buckets of a large model."""


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
    return [value % (1 << 64) for value in torch.cat([part.view(-1) for part in pending]).tolist()]


def pending_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digest as a 0-d int64 tensor on the tensor's device; the work is only queued on a GPU."""
    return pending_digests([tensor])[0]


@torch.no_grad()
def pending_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of tensors of one device as one int64 tensor there; on a GPU few launches serve for all of them."""
    data = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    device = data[0].device
    if device.type != "cuda" or not kernel_works(device):
        return torch.stack([_digest_by_torch(one) for one in data])
    data = [one.clone() if one.data_ptr() % WORD_BYTES else one for one in data]
    origin = data[0].data_ptr()
    extents = tuple((one.data_ptr() - origin, one.numel()) for one in data)
    with torch.cuda.device(device):
        return _table(extents, device).digests(data[0])


@torch.no_grad()
def bucket_digests(message: torch.Tensor, extents: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The same for the tensors that begin at these offsets of some bytes and have these sizes."""
    device = message.device
    if device.type != "cuda" or message.data_ptr() % WORD_BYTES or not kernel_works(device):
        return torch.stack([_digest_by_torch(message[start : start + size]) for start, size in extents])
    with torch.cuda.device(device):
        return _table(extents, device).digests(message)


def prepare_digests(device: torch.device, layouts: Iterable[tuple[tuple[int, int], ...]]) -> None:
    """Compile the kernel of a GPU, and put there what it needs to know of these arrangements of tensors.

    That waits for the device, which must not happen while a transfer is queued whose peer may have died.
    """
    if device.type == "cuda" and kernel_works(device):
        with torch.cuda.device(device):
            for extents in layouts:
                _table(extents, device)


@cache
def kernel_works(device: torch.device) -> bool:
    """Return whether this GPU's kernel can be compiled and agrees with torch; the first call takes a second.

    Where it does not, digests are taken by torch, which costs dozens of launches a tensor.
    """
    sizes = (1, 8, 4099, BLOCK_WORDS * WORD_BYTES + 13, 3 * BLOCK_WORDS * WORD_BYTES)
    samples = [torch.arange(size, device=device).mul_(37).to(torch.uint8) for size in sizes]
    origin = samples[0].data_ptr()
    extents = tuple((one.data_ptr() - origin, one.numel()) for one in samples)
    try:
        with torch.cuda.device(device):
            found = _table(extents, device).digests(samples[0]).tolist()
    # Triton, the C compiler that it calls and the driver raise errors of many kinds.
    except Exception as error:  # noqa: BLE001
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    else:
        if found == [int(_digest_by_torch(one)) for one in samples]:
            return True
        reason = "it computes other numbers than torch"
    log.warning("digests of weights are taken without a kernel, which is slower: %s", reason)
    return False


@lru_cache(KNOWN_LAYOUTS)
def _table(extents: tuple[tuple[int, int], ...], device: torch.device) -> BlockTable:
    from flotilla_weights.digest_kernel import BlockTable

    return BlockTable(extents, BLOCK_WORDS * WORD_BYTES, *_coefficients(device))


def _digest_by_torch(data: torch.Tensor) -> torch.Tensor:
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
