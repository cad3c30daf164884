"""The memory that a GPU has left, and what a micro-batch takes of it, measured before ranks work together.

Invariants: a pass over zeros measures what a micro-batch takes, in two sizes, from which others follow; what a session
changes is measured again. Ranks that work together agree before a pass whether the largest micro-batch of each fits, so
that none runs out of memory while others wait for it. A lone rank tries: it may run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from flotilla_core.errors import Exhausted

GIB = 1 << 30
PROBES = (1024, 3072)
"""Tokens of the two measured micro-batches."""
PROBE_SEQUENCE = 512
"""Tokens of each sequence of theirs."""


def free_bytes(device: torch.device) -> int:
    """Return what a GPU has left, with what torch holds and does not use; 0 for a CPU, whose memory others share."""
    if device.type != "cuda":
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


class Taken(NamedTuple):
    """The bytes that micro-batches take at most."""

    fixed: float
    """What a micro-batch of any size takes: gathered layers, gradients."""
    per_token: float

    def by(self, tokens: int) -> float:
        """Return what a micro-batch of so many tokens takes."""
        return self.fixed + self.per_token * tokens


@dataclass
class MicroBatchMemory:
    """Knows what micro-batches take, once they were measured."""

    device: torch.device
    probe: Callable[[int], None]
    """Runs forward and backward over about so many tokens; a collective."""
    _taken: Taken | None = None

    def forget(self) -> None:
        """Measure again before the next pass: layers keep other activations, or learn in another way."""
        self._taken = None

    def require(self, tokens: int) -> float:
        """Return the bytes of a micro-batch of so many tokens; refused on all ranks alike where one rank lacks them.

        A collective on GPUs; elsewhere nothing is measured.
        """
        if self.device.type != "cuda":
            return 0.0
        if self._taken is None:
            self._taken = self._measured()
        needed = self._taken.by(tokens)
        if dist.get_world_size() > 1:
            agree_on_room(needed - free_bytes(self.device), self.device)
        return needed

    def _measured(self) -> Taken:
        few, many = (self._peak(tokens) for tokens in PROBES)
        per_token = max(0.0, (many - few) / (PROBES[1] - PROBES[0]))
        return Taken(max(0.0, few - per_token * PROBES[0]), per_token)

    def _peak(self, tokens: int) -> int:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.probe(tokens)
        return torch.cuda.max_memory_allocated(self.device) - before


def agree_on_room(missing: float, device: torch.device) -> None:
    """Raise on all ranks if one of them lacks bytes; a collective."""
    most = torch.tensor(missing, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if float(most) > 0:
        raise out_of_memory(
            f"a rank lacks {float(most) / GIB:.1f} GiB for its largest one, as measured before"
        )


def out_of_memory(why: str) -> Exhausted:
    """Return the refusal of micro-batches of this size."""
    return Exhausted(
        "a micro-batch does not fit into the memory of the GPU",
        where="batching.tokens_per_microbatch",
        why=why,
        next_step="lower it, or set batching.activation_checkpointing to true",
    )
