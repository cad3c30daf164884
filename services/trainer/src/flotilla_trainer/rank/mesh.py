"""Arrange the ranks of a gang: the shard of the weights that each holds, its copy, and the lane that it works in.

Invariants: rank = copy x shards + shard, and rank = lane x width + place, so that the ranks that communicate most are
neighbours; a sum over the gang counts each lane at its first place only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
