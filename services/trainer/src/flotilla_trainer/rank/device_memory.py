"""The memory that a GPU has left, and what a micro-batch takes of it, measured before ranks work together.

Invariants: a pass over zeros measures what a micro-batch takes beside the gradients of an earlier one, in two sizes,
from which others follow; what a session changes is measured again. Ranks that work together agree before a pass
whether the largest micro-batch of each fits, and take the memory for it before any of them begins. So none runs out of
memory while others wait for it, and no other process takes that memory meanwhile. A lone rank tries: it may run out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from flotilla_core.errors import Exhausted
from flotilla_trainer.wire.settings import SMALLEST_BUDGET

GIB = 1 << 30
PROBES = (1024, 3072)
"""Tokens of the two measured micro-batches."""
PROBE_SEQUENCE = 512
"""Tokens of each sequence in these micro-batches."""
PIECES = (1, 2, 4, 8)
"""The numbers of pieces into which the memory of a pass may be divided; in more it counts as too scattered for one."""


def free_bytes(device: torch.device) -> int:
    """Return what tensors of this rank may still take of a GPU; 0 for a CPU, whose memory others share.

    It is what nobody holds, with what torch holds and does not use, and no more than the limit of the rank.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return min(free + held, limit) - used


class Taken(NamedTuple):
    """The bytes that micro-batches take at most."""

    fixed: float
    """The bytes that a micro-batch of any size takes: gathered layers, gradients."""
    per_token: float

    def by(self, tokens: int) -> float:
        """Return what a micro-batch of so many tokens takes."""
        return self.fixed + self.per_token * tokens


@dataclass
class MicroBatchMemory:
    """Knows what micro-batches take, once they were measured."""

    device: torch.device
    probe: Callable[[int, Callable[[], None]], None]
    """Runs forward and backward over about so many tokens, calls back, and runs them again; a collective.

    The gradients of the first time are there in the second.
    """
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
            agree_on_room(lacking(needed, self.device), self.device)
        return needed

    def fitting(self, tokens: int) -> int:
        """Return how many tokens a micro-batch may have: those asked for, halved until they fit; a collective."""
        while tokens >= 2 * SMALLEST_BUDGET:
            try:
                self.require(tokens)
            except Exhausted:
                tokens //= 2
            else:
                break
        return tokens

    def _measured(self) -> Taken:
        few, many = (self._peak(tokens) for tokens in PROBES)
        per_token = max(0.0, (many - few) / (PROBES[1] - PROBES[0]))
        return Taken(max(0.0, few - per_token * PROBES[0]), per_token)

    def _peak(self, tokens: int) -> int:
        before = torch.cuda.memory_allocated(self.device)
        # Every micro-batch but the first of an update has gradients beside it, whose memory small ones never reach.
        self.probe(tokens, lambda: torch.cuda.reset_peak_memory_stats(self.device))
        return torch.cuda.max_memory_allocated(self.device) - before


def lacking(needed: float, device: torch.device) -> float:
    """Return the bytes that this rank lacks; infinity where it has them in too small pieces; 0 where it took them.

    What it took stays with torch, so that the pass gets it and other processes do not.
    """
    missing = needed - free_bytes(device)
    if missing > 0:
        return missing
    return 0.0 if any(_took(needed / pieces, pieces, device) for pieces in PIECES) else math.inf


def _took(piece: float, pieces: int, device: torch.device) -> bool:
    try:
        held = [torch.empty(math.ceil(piece), dtype=torch.uint8, device=device) for _ in range(pieces)]
    except torch.OutOfMemoryError:
        return False
    del held
    return True


def agree_on_room(missing: float, device: torch.device) -> None:
    """Raise on all ranks if one of them lacks bytes; a collective."""
    most = torch.tensor(missing, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if math.isinf(float(most)):
        raise out_of_memory("a rank has the memory for its largest one in small pieces only")
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
