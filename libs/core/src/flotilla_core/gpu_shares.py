"""The parts of a GPU that neither a trainer rank nor a generator's engine may take, buckets of weights among them.

Invariant: who places a stack, who starts an engine and who sends weights compute with the same numbers, so what one of
them leaves free is there for the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

ENGINE_PROCESS = 2 << 30
"""The bytes that an engine's process takes beside tensors: the CUDA context, kernels and captured graphs."""
RANK_PROCESS = 1 << 30
"""The bytes that a rank's process takes beside tensors: the CUDA context, kernels and NCCL's buffers."""
SPARE = 0.04
"""Share of a GPU for what allocators cannot use."""
LEAST_SHARE = 0.01

BUCKETS_UNDER_WAY = 3
"""Buckets on their way: one moves while the next is packed, and the last one is digested."""
LEAST_BUCKETS = 4
"""Buckets of a model, so that some are packed or digested while another one moves."""
SMALL_BUCKET_BYTES = 256 << 20
"""Size from which buckets are not made smaller: a GPU takes as long to change over as to move several megabytes."""
SAME_GPU_BUCKETS = 3
SAME_GPU_BUCKET_BYTES = 128 << 20
"""Number and size of the buckets that a sender shares with receivers on its own GPU."""


def bucket_limit(model_bytes: int, asked: int) -> int:
    """Return the size of the buckets of a model, of which a sync asks for buckets of `asked` bytes."""
    return min(asked, max(model_bytes // LEAST_BUCKETS, SMALL_BUCKET_BYTES))


def ring_bytes(model_bytes: int, tensors: Iterable[int], asked: int) -> int:
    """Return the most that one end of a sync keeps for buckets; the sizes of the largest tensors suffice.

    A tensor above the size of a bucket has a bucket of its own. Padding between tensors is not counted.
    """
    limit = bucket_limit(model_bytes, asked)
    alone = heapq.nlargest(BUCKETS_UNDER_WAY, (size for size in tensors if size > limit))
    return min(model_bytes, sum(alone) + (BUCKETS_UNDER_WAY - len(alone)) * limit)


def set_aside(total: int, rings: int) -> int:
    """Return the bytes that nobody counts on, on a GPU of so many with buckets of so many."""
    return ENGINE_PROCESS + RANK_PROCESS + rings + int(total * SPARE)


def share_beside(standby: int, rings: int, total: int) -> float:
    """Return the most of a GPU that an engine may take beside a second copy of its weights and beside buckets."""
    return max(LEAST_SHARE, math.floor((1 - (standby + set_aside(total, rings)) / total) * 1000) / 1000)
