"""Gather the rows of sharded tensors, many in one collective, one group ahead of whoever takes them.

Invariants: every rank gathers the same groups in the same order; shards are rounded before they are gathered, so that
half of the bytes move; on GPUs a gather only queues work, and the next group is on its way while the last one is used.
What one rank holds alone is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from flotilla_trainer.rank.cut import Cut, gathered, local

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
            with torch.no_grad():
                held = [(name, [local(tensor).detach()]) for name, tensor in tensors]
            yield from held
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
        self._places: dict[str, tuple[int, list[tuple[int, ...]]]] = {}
        self._work: Any = None
        end, group, parts = 0, None, list[tuple[int, torch.Tensor]]()
        for name, tensor in tensors:
            cut = Cut.of(name, tensor)
            if cut.group is not None and tensor.is_floating_point():
                group, shapes = cut.group, cut.shapes()
                self._places[name] = end, shapes
                parts.append((end, local(tensor)))
                end += -(-math.prod(shapes[0]) // ALIGNMENT) * ALIGNMENT
        if group is None:
            return
        ours = torch.empty(end, dtype=dtype, device=parts[0][1].device)
        # A rank may hold no row of any of them: a head with one row has them all on the first rank.
        held = [(start, part) for start, part in parts if part.numel()]
        if held:
            targets = [ours[start:][: part.numel()].view(part.shape) for start, part in held]
            torch._foreach_copy_(targets, [part for _, part in held])
        self._all = ours.new_empty(group.size(), end)
        self._work = dist.all_gather_into_tensor(self._all.view(-1), ours, group=group, async_op=True)

    def rows(self) -> Iterator[Rows]:
        """Yield each tensor's rows, in the order of the ranks that hold them."""
        if self._work is not None:
            self._work.wait()
        for name, tensor in self._tensors:
            if name not in self._places:
                yield name, [gathered(tensor).detach()]
                continue
            (start, shapes), parts = self._places[name], []
            for part, shape in enumerate(shapes):
                if size := math.prod(shape):
                    parts.append(self._all[part, start : start + size].view(shape))
            yield name, parts
