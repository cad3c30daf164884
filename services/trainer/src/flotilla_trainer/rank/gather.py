"""Gather the rows of sharded tensors, many in one collective, one group ahead of whoever takes them.

Invariants: every rank gathers the same groups in the same order; shards are rounded before they are gathered, so that
half of the bytes move; on GPUs a gather only queues work, and the next group is on its way while the last one is used.
What one rank holds alone is not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

Named = tuple[str, torch.Tensor]
Rows = tuple[str, list[torch.Tensor]]
ALIGNMENT = 64
"""Elements: shards begin at multiples of it, so that copies of them are fast."""


def rows_of(groups: Iterable[list[Named]], dtype: torch.dtype) -> Iterator[Rows]:
    """Yield the rows of all tensors of all groups, in parts; all ranks have to iterate to the end.

    Sharded floating-point tensors are rounded to `dtype`; the others are as they are.
    """
    if dist.get_world_size() == 1:
        for tensors in groups:
            yield from ((name, [part]) for name, part in _held(tensors))
        return
    ahead: _Group | None = None
    for tensors in groups:
        started = _Group(tensors, dtype)
        if ahead is not None:
            yield from ahead.rows()
        ahead = started
    if ahead is not None:
        yield from ahead.rows()


class _Group:
    """Some tensors whose shards travel together."""

    @torch.no_grad()
    def __init__(self, tensors: list[Named], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._places: dict[str, int] = {}
        self._work: Any = None
        together = [(name, tensor) for name, tensor in tensors if _is_cut(tensor)]
        if not together:
            return
        mesh = together[0][1].device_mesh
        self._shards = mesh.size(mesh.ndim - 1)
        end = 0
        for name, tensor in together:
            self._places[name] = end
            end += -(-_rows_each(tensor, self._shards) * _row_size(tensor) // ALIGNMENT) * ALIGNMENT
        ours = torch.empty(end, dtype=dtype, device=together[0][1].device)
        # A rank may hold no row of any of them: a head with one row has them all on the first rank.
        held = [(name, part) for name, tensor in together if (part := tensor.to_local()).numel()]
        if held:
            targets = [ours[self._places[name] :][: part.numel()].view(part.shape) for name, part in held]
            torch._foreach_copy_(targets, [part for _, part in held])
        self._all = ours.new_empty(self._shards, end)
        self._work = dist.all_gather_into_tensor(
            self._all.view(-1), ours, group=mesh.get_group(mesh.ndim - 1), async_op=True
        )

    def rows(self) -> Iterator[Rows]:
        """Yield each tensor's rows, in the order of the ranks that hold them."""
        if self._work is not None:
            self._work.wait()
        for name, tensor in self._tensors:
            if name not in self._places:
                yield name, [_whole(tensor)]
                continue
            each, start, parts = _rows_each(tensor, self._shards), self._places[name], []
            for shard in range(self._shards):
                rows = min(each, len(tensor) - shard * each)
                if rows > 0:
                    flat = self._all[shard, start : start + rows * _row_size(tensor)]
                    parts.append(flat.view(rows, *tensor.shape[1:]))
            yield name, parts


def _is_cut(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is cut by rows over several ranks, as FSDP cuts all parameters."""
    if not isinstance(tensor, DTensor) or not tensor.is_floating_point():
        return False
    *copies, last = tensor.placements
    return last == Shard(0) and all(place.is_replicate() for place in copies)


@torch.no_grad()
def _held(tensors: list[Named]) -> list[Named]:
    """Return what the only rank holds of them."""
    return [(name, part.to_local() if isinstance(part, DTensor) else part.detach()) for name, part in tensors]


@torch.no_grad()
def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _rows_each(tensor: torch.Tensor, shards: int) -> int:
    """Rows of the first shard, and of all others that are full."""
    return -(-len(tensor) // shards)


def _row_size(tensor: torch.Tensor) -> int:
    return tensor.numel() // len(tensor)
