"""The places of numbers among ranks: their mesh, the part of a tensor that each holds, and how parts become the whole.

No other module reads placements. Invariants: rank = copy x shards + shard, and rank = lane x width + place, so that the
ranks that communicate most are neighbours; a sum over the gang counts each lane at its first place only. FSDP cuts
parameters by rows over the last dimension of their mesh, into equal parts of which the last ones may be short or empty;
along the other dimensions ranks hold copies, of which the first counts. What is not sharded, such as an adapter, is
whole on every rank, and that of rank 0 counts. `Cut.of` refuses any other placement. Rows are gathered many in one
collective, one group ahead of whoever takes them: every rank gathers the same groups in the same order; shards are
rounded before, so that half of the bytes move; on GPUs a gather only queues work. What one rank holds alone is not
copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flotilla_core.errors import Unimplemented

Named = tuple[str, torch.Tensor]
Rows = tuple[str, list[torch.Tensor]]
ALIGNMENT = 64
"""Elements: shards begin at multiples of it, so that copies of them are fast."""


@dataclass(frozen=True)
class RankMesh:
    """The place of one rank among all of them."""

    weights: DeviceMesh
    """The mesh that FSDP spreads the weights over: shards, or copies x shards."""
    shard: int
    shards: int
    copy: int
    place: int
    """The part of its lane's tokens that this rank takes."""
    width: int
    """The number of ranks of a lane, which share each micro-batch."""
    lane: dist.ProcessGroup
    """The ranks of this rank's lane."""

    @classmethod
    def form(cls, device_type: str, *, replicate: int = 1, sequence_parallel: int = 1) -> RankMesh:
        """Arrange all ranks; a collective."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        shards = ranks // replicate
        if replicate == 1:
            weights = init_device_mesh(device_type, (ranks,))
        else:
            weights = init_device_mesh(device_type, (replicate, shards), mesh_dim_names=("copy", "shard"))
        lanes = init_device_mesh(
            device_type,
            (ranks // sequence_parallel, sequence_parallel),
            mesh_dim_names=("lane", "place"),
        )
        return cls(
            weights=weights,
            shard=rank % shards,
            shards=shards,
            copy=rank // shards,
            place=rank % sequence_parallel,
            width=sequence_parallel,
            lane=lanes.get_group("place"),
        )

    @property
    def counts_tokens(self) -> bool:
        """Return whether sums over the gang include this rank's micro-batches; the rest of the lane has the same."""
        return self.place == 0


class Cut(NamedTuple):
    """The part [offset, offset + size) along one dimension of a tensor, and the ranks that hold the other parts."""

    whole: torch.Size
    mesh_dims: tuple[int, ...]
    """The dimensions of the mesh along which `group` holds the parts in order; none where this rank has the whole."""
    dim: int
    offset: int
    size: int
    counts: bool
    """True if sums and files of all ranks take this rank's part; other holders of it have the same numbers."""
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Cut:
        """Return how the tensor of this name is cut; refuse what no other module could gather, count or save."""
        whole = tensor.shape
        if not isinstance(tensor, DTensor):
            return cls(whole, (), 0, 0, whole[0] if whole else 1, dist.get_rank() == 0, None)
        mesh, last = tensor.device_mesh, tensor.device_mesh.ndim - 1
        if tensor.placements != (*[Replicate()] * last, Shard(0)):
            why = f"its placements are {tensor.placements}, and not rows over the last mesh dimension"
            raise Unimplemented("a parameter is cut in a way that is not supported", where=name, why=why)
        *copy, part = mesh.get_coordinate() or ()
        offset, size = _range(whole[0], part, mesh.size(last))
        return cls(whole, (last,), 0, offset, size, not any(copy), mesh.get_group(last))

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of all parts in their order; none is larger than the first."""
        before, length, after = self.whole[: self.dim], self.whole[self.dim], self.whole[self.dim + 1 :]
        parts = self.group.size() if self.group else 1
        return [(*before, _range(length, part, parts)[1], *after) for part in range(parts)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def visiting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor on the device that its ranks compute on: a copy, if it rests elsewhere."""
    part = local(tensor)
    if not isinstance(tensor, DTensor) or part.device.type == tensor.device_mesh.device_type:
        return tensor
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    part = part.detach().to(mesh.device_type, non_blocking=True)
    return DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in full on the device, and the model's own where one rank holds all of it; a collective."""
    tensor = visiting(tensor)
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
        return tensor.full_tensor()
    return local(tensor)


def scatter(name: str, whole: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy to every rank its part of a whole tensor whose numbers rank 0 has; a collective."""
    cut = Cut.of(name, parameter)
    assert cut.mesh_dims and isinstance(parameter, DTensor), "all parameters are cut"
    local(parameter).copy_(local(distribute_tensor(whole, parameter.device_mesh, parameter.placements)))


def _range(length: int, part: int, parts: int) -> tuple[int, int]:
    """Return where a part begins and how long it is: all have one length, but the last ones."""
    each = -(-length // parts)
    first = min(part * each, length)
    return first, min(each, length - first)


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
