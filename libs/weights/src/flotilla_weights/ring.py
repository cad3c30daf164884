"""Buffers that the buckets of a publication take one after the other, kept from one publication to the next.

Invariants: bucket i lies where bucket i minus `BUCKETS_UNDER_WAY` lay, so it is written after that one was read;
the views of its tensors are made once, because Python takes longer to make one than a GPU to move a small tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flotilla_core.gpu_shares import BUCKETS_UNDER_WAY
from flotilla_weights.manifest import Bucket, Manifest

Named = list[tuple[str, torch.Tensor]]


class Ring:
    """The buffers for one manifest on one device; their memory is allocated when it is first needed."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest = manifest
        self._device = device
        self._memory: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, Named] = {}
        self._rows: dict[int, tuple[list[int], list[torch.Tensor]]] = {}

    def message(self, index: int) -> torch.Tensor:
        """Return the bytes of a bucket."""
        buckets, place = self.manifest.buckets, index % BUCKETS_UNDER_WAY
        if place not in self._memory:
            most = max(bucket.nbytes for bucket in buckets[place::BUCKETS_UNDER_WAY])
            self._memory[place] = torch.empty(most, dtype=torch.uint8, device=self._device)
        return self._memory[place][: buckets[index].nbytes]

    def tensors(self, index: int) -> Named:
        """Return the tensors of a bucket; the same list in every publication."""
        if index not in self._tensors:
            self._tensors[index] = unpack(self.manifest.buckets[index], self.message(index))
        return self._tensors[index]

    def rows(self, index: int, given: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the places of these parts of the tensors of a bucket."""
        lengths = [len(part) if len(parts) > 1 else -1 for parts in given for part in parts]
        known, rows = self._rows.get(index, ([], []))
        if known != lengths:
            rows = []
            for (_, whole), parts in zip(self.tensors(index), given, strict=True):
                rows += whole.split([len(part) for part in parts]) if len(parts) > 1 else [whole]
            self._rows[index] = lengths, rows
        return rows


def unpack(bucket: Bucket, message: torch.Tensor) -> Named:
    """Return views of the tensors in the bytes of a bucket."""
    return [
        (
            slot.spec.name,
            message[slot.offset : slot.offset + slot.spec.nbytes]
            .view(slot.spec.torch_dtype)
            .view(slot.spec.shape),
        )
        for slot in bucket.slots
    ]
