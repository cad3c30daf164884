"""GPUs for weight groups on a host without any: host memory that the threads of one process share.

Each thread sits on one of them, that of its process unless it says otherwise. Invariant: what is replaced is the memory
and the names of the GPUs, and nccl by gloo; stores, lanes, counts and deadlines are those of the product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from flotilla_weights import group, process_group, wire

COUNT = 3
NBYTES = 5000


class HostBuckets:
    """Buckets in memory that threads share; copies end when they are asked for the second time."""

    count = COUNT
    nbytes = NBYTES

    def __init__(self, memory: torch.Tensor, closed: list[HostBuckets]) -> None:
        self._memory = memory
        self._closed = closed

    def write(self, bucket: int, piece: torch.Tensor) -> Callable[[], bool]:
        """Copy a piece into a bucket."""
        return self._copied(self._part(bucket, piece), piece)

    def read(self, bucket: int, piece: torch.Tensor) -> Callable[[], bool]:
        """Copy a bucket into a piece."""
        return self._copied(piece, self._part(bucket, piece))

    def close(self) -> None:
        """Be counted."""
        self._closed.append(self)

    def _part(self, bucket: int, piece: torch.Tensor) -> torch.Tensor:
        return self._memory[bucket * NBYTES :][: piece.numel()]

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        asked = iter([False])

        def ended() -> bool:
            if next(asked, True):
                return True
            target.copy_(source)
            return False

        return ended


class GlooAsNccl:
    """A group that is waited for and left as one of nccl is."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Start moving a tensor."""
        return self._group.broadcast(tensors, options)

    def abort(self) -> None:
        """Leave."""
        del self._group


class PretendGpus:
    """The GPUs of one process, and what happened to their buckets."""

    def __init__(self, ours: str = "GPU-1") -> None:
        self._ours = ours
        self.closed: list[HostBuckets] = []
        self.unmappable: set[str] = set()
        self._memory: dict[str, torch.Tensor] = {}
        self._here = threading.local()

    def replace_real_ones(self, replace: Callable[[Any, str, Any], None] = setattr) -> None:
        """Have this process believe in them."""
        replace(torch.cuda, "is_available", lambda: True)
        replace(group, "_device_for", lambda _link, _device: torch.device("cpu"))
        replace(wire, "gpu_of", self._name)
        replace(wire, "own_buckets", self._own)
        replace(wire, "mapped_buckets", self._mapped)
        connected = process_group.connected_group

        def connected_by_gloo(_carrier: str, *members: Any, **place: Any) -> GlooAsNccl:
            return GlooAsNccl(connected(process_group.GLOO, *members, **place))

        replace(wire, "connected_group", connected_by_gloo)

    def sit_on(self, name: str) -> None:
        """Put the calling thread on a GPU."""
        self._here.name = name

    def _name(self, _device: torch.device) -> str:
        return getattr(self._here, "name", self._ours)

    def _own(self, device: torch.device) -> tuple[HostBuckets, str]:
        name = self._name(device)
        memory = self._memory.setdefault(name, torch.empty(COUNT * NBYTES, dtype=torch.uint8))
        return HostBuckets(memory, self.closed), name

    def _mapped(self, description: str, device: torch.device) -> HostBuckets:
        if description in self.unmappable:
            raise RuntimeError("cuIpcOpenMemHandle_v2 failed with 101: invalid device ordinal")
        assert description == self._name(device), "memory of another GPU"
        return HostBuckets(self._memory[description], self.closed)
