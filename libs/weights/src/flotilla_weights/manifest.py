"""The contents of one weight sync, in the order of the wire.

Invariants: both ends of a sync hold an equal manifest (equal `digest`) and therefore cut the same buckets; the tensors
of one layer are contiguous, embeddings come first; a tensor never straddles two buckets: one that is larger than
`bucket_bytes` gets a bucket of its own, which is sent without being copied. Adapters are a manifest of their own
inside: they move after the tensors, and from the second publication of a group on without them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import InvalidRequest
from flotilla_core.gpu_shares import bucket_limit, ring_bytes
from flotilla_weights.adapters import AdapterNames

ALIGNMENT = 64
"""Every tensor starts at a multiple of this within its bucket, so that it can be viewed as its own type."""

MAX_TENSORS = 1_000_000


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of one tensor of the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type of that name."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidRequest(f"unknown tensor type {self.dtype!r}", where=self.name)
        return dtype

    @property
    def nbytes(self) -> int:
        """Size of the dense tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """The position of a tensor within its bucket."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class Bucket:
    """One message of the wire."""

    slots: tuple[Slot, ...]
    nbytes: int

    @cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of each tensor."""
        return tuple((slot.offset, slot.spec.nbytes) for slot in self.slots)


@dataclass(frozen=True)
class Adapters:
    """The changing part of a model whose weights stay frozen."""

    manifest: Manifest
    scale: float

    def checked(self, base: Manifest) -> Self:
        """Refuse adapters of a weight that `base` has not, and those that do not fit theirs."""
        given = {spec.name: spec.shape for spec in self.manifest.tensors}
        for spec in base.tensors:
            a, b = (given.pop(name, None) for name in AdapterNames.of(spec.name))
            if a is None and b is None:
                continue
            if a is None or b is None or (b[0], a[-1]) != spec.shape or a[0] != b[-1]:
                raise InvalidRequest(
                    "the adapters of a weight do not fit it",
                    where=spec.name,
                    why=f"A is {a}, B is {b}, the weight is {spec.shape}",
                )
        if given:
            raise InvalidRequest("an adapter belongs to no weight of the manifest", where=next(iter(given)))
        return self


@dataclass(frozen=True)
class Manifest:
    """All tensors of a sync and the cuts between its messages."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    adapters: Adapters | None = None
    """Absent where all tensors change."""

    @classmethod
    def from_named(
        cls, named: Iterable[tuple[str, torch.dtype | str, Iterable[int]]], bucket_bytes: int
    ) -> Manifest:
        """Order (name, dtype, shape) triples as the wire wants them."""
        specs = [
            TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in named
        ]
        return cls(tuple(_wire_order(specs)), bucket_bytes)._checked()

    @classmethod
    def from_proto(cls, proto: weights_pb2.WeightManifest) -> Manifest:
        """Read a manifest and check that its digest is that of its content."""
        manifest = cls(_read_specs(proto.tensors), proto.bucket_bytes)._checked()
        if proto.HasField("adapters"):
            adapters = cls(_read_specs(proto.adapters.tensors), proto.bucket_bytes)._checked()
            manifest = manifest.with_adapters(adapters, proto.adapters.scale)
        if manifest.digest != proto.digest:
            raise InvalidRequest(
                "the manifest's digest is not that of its content",
                why=f"computed {manifest.digest[:12]}, given {proto.digest[:12] or 'none'}",
                next_step="run the same release of Flotilla on both ends",
            )
        return manifest

    def to_proto(self) -> weights_pb2.WeightManifest:
        """Return the manifest as it travels."""
        proto = weights_pb2.WeightManifest(
            tensors=_spec_protos(self.tensors), bucket_bytes=self.bucket_bytes, digest=self.digest
        )
        if self.adapters is not None:
            proto.adapters.tensors.extend(_spec_protos(self.adapters.manifest.tensors))
            proto.adapters.scale = self.adapters.scale
        return proto

    def in_enough_buckets(self) -> Manifest:
        """Return the same in smaller buckets, where large ones are less than a few."""
        return replace(self, bucket_bytes=bucket_limit(self.nbytes, self.bucket_bytes))

    def with_adapters(self, adapters: Manifest, scale: float) -> Manifest:
        """Return the same, with what is added to some of the tensors; one bucket size holds for both."""
        adapters = replace(adapters, bucket_bytes=self.bucket_bytes)
        return replace(self, adapters=Adapters(adapters, scale).checked(self))

    @property
    def all_tensors(self) -> tuple[TensorSpec, ...]:
        """Whatever has a digest, in that order: the tensors, then the adapters."""
        return self.tensors + (self.adapters.manifest.tensors if self.adapters is not None else ())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, types, shapes, their order and the bucket size, and over the adapters."""
        lines = [f"bucket_bytes={self.bucket_bytes}"]
        lines += [f"{t.name}\t{t.dtype}\t{','.join(map(str, t.shape))}" for t in self.tensors]
        if self.adapters is not None:
            lines.append(f"adapters={self.adapters.manifest.digest} scale={self.adapters.scale!r}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Greedy cuts: a bucket is closed before it would outgrow `bucket_bytes`."""
        buckets: list[Bucket] = []
        slots: list[Slot] = []
        end = 0
        for spec in self.tensors:
            if slots and end + spec.nbytes > self.bucket_bytes:
                buckets.append(_bucket(slots))
                slots, end = [], 0
            slots.append(Slot(spec, end))
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        if slots:
            buckets.append(_bucket(slots))
        return tuple(buckets)

    def messages(self, *, first: bool) -> int:
        """Buckets of the first publication of a group, or of a later one."""
        adapters = 0 if self.adapters is None else len(self.adapters.manifest.buckets)
        return adapters + (len(self.buckets) if first or self.adapters is None else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without padding and without adapters."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def ring_bytes(self) -> int:
        """The most that one end keeps for buckets of it."""
        return ring_bytes(self.nbytes, (t.nbytes for t in self.tensors), self.bucket_bytes)

    def _checked(self) -> Manifest:
        if not 0 < len(self.tensors) <= MAX_TENSORS or self.bucket_bytes <= 0:
            raise InvalidRequest(
                "a manifest needs tensors and a bucket size",
                why=f"{len(self.tensors)} tensors, bucket_bytes={self.bucket_bytes}",
            )
        seen: set[str] = set()
        for spec in self.tensors:
            if spec.name in seen or not spec.name:
                raise InvalidRequest("a tensor has no name or a name twice", where=spec.name)
            if spec.nbytes <= 0 or any(size <= 0 for size in spec.shape):
                raise InvalidRequest("a tensor is empty", where=spec.name, why=f"its shape is {spec.shape}")
            seen.add(spec.name)
        return self


def _read_specs(protos: Iterable[weights_pb2.TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in protos)


def _spec_protos(specs: Iterable[TensorSpec]) -> list[weights_pb2.TensorSpec]:
    return [weights_pb2.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in specs]


def _bucket(slots: list[Slot]) -> Bucket:
    last = slots[-1]
    return Bucket(tuple(slots), last.offset + last.spec.nbytes)


def _wire_order(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Embeddings, then each stack of layers by index, then the rest; stable within each."""
    stacks: dict[str, int] = {}

    def key(spec: TensorSpec) -> tuple[Any, ...]:
        parts = spec.name.split(".")
        for position, part in enumerate(parts):
            if part.isdigit():
                stack = stacks.setdefault(".".join(parts[:position]), len(stacks))
                return (1, stack, int(part))
        return (0, 0, 0) if "embed" in spec.name else (2, 0, 0)

    return sorted(specs, key=key)
