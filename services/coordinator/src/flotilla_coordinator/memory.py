"""One place for what all threads of this process allocate.

Messages come in on threads of gRPC, are used by the loop and freed by the thread that writes the ledger. With a place
for each thread, as glibc has it, what one frees is no use to another, and the process holds its peaks several times.
"""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8
ARENAS = 2


def share_allocations() -> None:
    """From now on; called before there are threads."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:  # glibc has it, others share more
        limit(M_ARENA_MAX, ARENAS)
