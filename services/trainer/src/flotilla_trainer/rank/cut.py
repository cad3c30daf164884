"""The part of a whole tensor that this rank holds, and how parts become the whole; no other module reads placements.

Invariants: FSDP cuts parameters by rows over the last dimension of their mesh, into equal parts of which the last ones
may be short or empty; along the other dimensions ranks hold copies, of which the first counts. What is not sharded,
such as an adapter, is whole on every rank, and that of rank 0 counts. `Cut.of` refuses any other placement.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flotilla_core.errors import Unimplemented


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
