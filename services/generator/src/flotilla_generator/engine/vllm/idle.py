"""A vLLM worker that rests between steps.

A worker polls for its next message in a tight loop and goes to sleep only a second after the last one. In a training
loop that second is the trainer's: on two cores it costs a quarter of every step.

Invariant: only the time until sleep changes; a message that arrives wakes the worker as before.
"""

from __future__ import annotations

import torch

SPIN_S = 0.005


def rest_between_messages() -> None:
    """Shorten the tight loop of every message queue that this process opens from now on (CPU only)."""
    if torch.cuda.is_available():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is not None and condition.__init__.__defaults__ == (1,):
        condition.__init__.__defaults__ = (SPIN_S,)
