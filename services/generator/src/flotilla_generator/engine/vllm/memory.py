"""Memory of weights that decode no more goes back to the system.

The allocator keeps what is freed for whoever asks next, each thread in a place of its own. Weights of the next sync
come from other threads, in another order, and do not fit the gaps: without this a worker holds gaps of more than two
models, and larger ones from sync to sync.
"""

from __future__ import annotations

import ctypes
import threading

from flotilla_generator.engine.vllm.twin import Twin


def free_beside_decoding(twin: Twin) -> None:
    """Let go of what was live: that takes long, so it has a thread of its own."""
    threading.Thread(target=_free, args=(twin,), name="weights-free", daemon=True).start()


def _free(twin: Twin) -> None:
    vars(twin).clear()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:  # glibc has it, others keep less
        give_back(0)
