"""The parts of a GPU that neither a trainer rank nor a generator's engine may take.

Invariant: who places a stack and who starts an engine compute with the same numbers, so what one of them leaves free is
there for the other.
"""

from __future__ import annotations

import math

RESERVED = 4 << 30
"""Two CUDA contexts with their kernels, the captured graphs, the buckets of a weight sync, and NCCL's buffers."""
SPARE = 0.04
"""Share of a GPU for what allocators cannot use."""
LEAST_SHARE = 0.01


def set_aside(total: int) -> int:
    """Return the bytes that nobody counts on, on a GPU of so many."""
    return RESERVED + int(total * SPARE)


def share_beside(standby: int, total: int) -> float:
    """Return the most of a GPU that an engine may take beside a second copy of its weights of so many bytes."""
    return max(LEAST_SHARE, math.floor((1 - (standby + set_aside(total)) / total) * 1000) / 1000)
