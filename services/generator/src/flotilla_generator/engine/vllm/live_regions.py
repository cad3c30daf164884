"""The places of a checkpoint's tensors in the live model, learned from vLLM's own loaders.

A rehearsal runs the loaders on the live parameters and keeps what they would copy where, without a write. From then on
a commit is those copies, into the memory that captured graphs read.

Invariants: regions are used only if they fill every element of every parameter exactly once, by plain copies out of
every tensor of the checkpoint, and agree with what a whole load made of the same tensors; a model that makes anything
else of its weights (packed, quantized or absorbed ones) has no regions, because what it made would become stale. What
the regions hold is compared by digests: that of the sender where a region is a whole tensor, else one of the part.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flotilla_generator.engine.vllm.fused_experts import METHOD as EXPERTS_METHOD
from flotilla_generator.engine.vllm.fused_experts import are_plain
from flotilla_weights.digest import pending_digests, resolve
from flotilla_weights.inbox import StagedModel

PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""The methods of vLLM that multiply by the parameter itself."""
aten = torch.ops.aten

Digests = dict[str, list[int]]
"""Digests by the name of a tensor in the checkpoint, one for each of its regions."""


class NoRegionsError(Exception):
    """The reason why weights do not lie in this model as they lie in the checkpoint."""


@dataclass(frozen=True)
class Region:
    """A part of a live parameter, and where its numbers lie in a tensor of the checkpoint."""

    name: str
    live: torch.Tensor
    stride: tuple[int, ...]
    offset: int

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of this region in a new value of its tensor."""
        return tensor.as_strided(self.live.shape, self.stride, tensor.storage_offset() + self.offset)

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Return whether the live bytes of the region are those of the tensor."""
        same = self.live.numel() == tensor.numel() and self.live.dtype == tensor.dtype
        return same and self.live.is_contiguous() and self.part_of(tensor).is_contiguous()


class LiveRegions:
    """All regions of one live model."""

    def __init__(
        self, model: torch.nn.Module, regions: dict[str, list[Region]], zeros: list[torch.Tensor]
    ) -> None:
        self._model = model
        self.by_name = regions
        self._zeros = zeros
        self._memory = _addresses(model)

    @classmethod
    def learned(cls, model: Any, staged: StagedModel) -> LiveRegions:
        """Rehearse the load of `staged`; nothing is written.

        The rehearsal runs vLLM's code, which may raise anything else than NoRegionsError too.
        """
        _require_plain(model)
        weights = staged.weights
        with torch.no_grad(), _Rehearsal() as rehearsal:
            model.load_weights(iter(weights))
        places = sorted((_Place(name, tensor) for name, tensor in weights), key=lambda place: place.start)
        regions: dict[str, list[Region]] = {name: [] for name, _ in weights}
        for live, source in rehearsal.copies:
            if live.numel():
                region = _region(live, source, places)
                regions[region.name].append(region)
        unused = [name for name, found in regions.items() if not found]
        if unused:
            raise NoRegionsError(f"no parameter takes {unused[0]} as it is")
        zeros = rehearsal.zeros
        _require_filled(model, [region.live for found in regions.values() for region in found] + zeros)
        return cls(model, regions, zeros)

    def require_agreement(self, staged: StagedModel) -> None:
        """Refuse regions that hold something else than a whole load made of `staged`."""
        if not self.stand():
            raise NoRegionsError("a load moves the parameters")
        for name, tensor in staged.tensors(self._device):
            for region in self.by_name[name]:
                if not torch.equal(region.live, region.part_of(tensor).to(region.live)):
                    raise NoRegionsError(f"{name} is loaded in another way than by a copy")
        if any(bool(padding.any()) for padding in self._zeros):
            raise NoRegionsError("padding is not zero")

    def stand(self) -> bool:
        """Return whether the model still uses the memory that the regions are in."""
        return _addresses(self._model) == self._memory

    def expected(self, staged: StagedModel) -> Digests:
        """Return what the digests of the regions are where `staged` is live."""
        known = staged.digests
        expected: Digests = {}
        pending: dict[str, torch.Tensor] = {}
        for name, tensor in staged.tensors(self._device):
            if name in known and self.is_whole(name, tensor):
                expected[name] = [known[name]]
            else:
                parts = [region.part_of(tensor).to(self._device) for region in self.by_name[name]]
                pending[name] = self.digests(name, parts)
        return expected | resolved(pending)

    def digests(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Queue the digests that the regions of a tensor have with these parts of it."""
        regions = self.by_name[name]
        return pending_digests([part.to(one.live.dtype) for one, part in zip(regions, parts, strict=True)])

    def is_whole(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the live bytes of a tensor are those of this value of it, in one place."""
        regions = self.by_name[name]
        return len(regions) == 1 and regions[0].is_whole(tensor)

    def memory(self) -> list[torch.Tensor]:
        """Return every piece of memory that the regions are in, flat."""
        written = [region.live for found in self.by_name.values() for region in found] + self._zeros
        pieces: dict[int, torch.Tensor] = {}
        for part in written:
            storage = part.untyped_storage()
            if storage.data_ptr() not in pieces and part.numel():
                size = storage.nbytes() // part.itemsize
                pieces[storage.data_ptr()] = part.as_strided((size,), (1,), 0)
        return list(pieces.values())

    def differing(self, expected: Digests) -> list[str]:
        """Return what differs from digests that the regions should have."""
        lives = [region.live for name in expected for region in self.by_name[name]]
        padding = [part.any().long() for part in self._zeros]
        values = iter(resolve([pending_digests(lives), *padding]))
        wrong = [name for name, digests in expected.items() if list(islice(values, len(digests))) != digests]
        faults = [f"{name}: live tensor differs from what was committed" for name in wrong]
        return faults + (["the padding of a tensor is not zero"] if any(values) else [])

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def resolved(pending: dict[str, torch.Tensor]) -> Digests:
    """Fetch digests of parts of tensors that were queued."""
    values = iter(resolve(list(pending.values())))
    return {name: list(islice(values, queued.numel())) for name, queued in pending.items()}


class _Rehearsal(TorchDispatchMode):
    """Keeps what loaders would write, and lets them write nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.zeros: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if func is aten.copy_.default:
            self.copies.append((target, args[1]))
        elif func is aten.zero_.default or (func is aten.fill_.Scalar and args[1] == 0):
            self.zeros.append(target)
        else:
            raise NoRegionsError(f"a loader calls {func}")
        return target


class _Place:
    """The memory of one tensor of the checkpoint."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise NoRegionsError(f"{name} is not contiguous")
        self.name = name
        self._tensor = tensor
        self.start = tensor.data_ptr()

    def offset_of(self, part: torch.Tensor) -> int | None:
        """Return how many numbers lie before those of `part`, or None if it lies elsewhere."""
        tensor = self._tensor
        offset, rest = divmod(part.data_ptr() - self.start, tensor.itemsize)
        last = offset + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
        inside = part.device == tensor.device and part.dtype == tensor.dtype and rest == 0
        return offset if inside and offset >= 0 and last < tensor.numel() else None


def _region(live: torch.Tensor, source: torch.Tensor, places: list[_Place]) -> Region:
    if live.shape != source.shape:
        raise NoRegionsError(f"a loader spreads {list(source.shape)} over {list(live.shape)}")
    before = bisect_right(places, source.data_ptr(), key=lambda place: place.start)
    place = places[max(before - 1, 0)]
    offset = place.offset_of(source)
    if offset is None:
        raise NoRegionsError(
            f"a loader computes a {list(source.shape)} that is in no tensor of the checkpoint"
        )
    return Region(place.name, live.detach(), source.stride(), offset)


def _require_plain(model: torch.nn.Module) -> None:
    """Refuse a model that keeps something made of its weights beside its parameters."""
    for name, module in model.named_modules():
        if type(module).__name__ == EXPERTS_METHOD:
            continue  # vLLM's method for experts is a module; the layer that has it is looked at
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS and not are_plain(module):
            raise NoRegionsError(f"{name} has a {type(method).__name__}")
        attends = type(module).__name__ == "Attention"
        if attends and getattr(getattr(module, "impl", None), "sinks", None) is not None:
            raise NoRegionsError(f"{name} has sinks")
        if attends:
            continue
        if callable(getattr(module, "process_weights_after_loading", None)):
            raise NoRegionsError(f"{name} is a {type(module).__name__}, which processes its weights")
        kept = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
        if kept:
            raise NoRegionsError(f"{name} keeps {kept[0]} beside its parameters")


def _require_filled(model: torch.nn.Module, written: list[torch.Tensor]) -> None:
    """Refuse unless these are every element of every parameter, each once, and nothing else but whole buffers."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    by_address = {tensor.untyped_storage().data_ptr(): (name, tensor) for name, tensor in own.items()}
    parts: dict[int, list[torch.Tensor]] = {
        parameter.untyped_storage().data_ptr(): [] for parameter in model.parameters() if parameter.numel()
    }
    for part in written:
        if part.numel():
            address = part.untyped_storage().data_ptr()
            if address not in by_address or part.dtype != by_address[address][1].dtype:
                raise NoRegionsError("a loader writes to what is no parameter")
            parts.setdefault(address, []).append(part)
    for address, found in parts.items():
        name, tensor = by_address[address]
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        if size != tensor.numel():
            raise NoRegionsError(f"{name} is a part of a larger piece of memory")
        filled = torch.zeros(size, dtype=torch.bool, device=tensor.device)
        for part in found:
            filled.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
        if sum(part.numel() for part in found) != tensor.numel() or int(filled.sum()) != tensor.numel():
            raise NoRegionsError(f"{name} is not filled by copies alone")


def _addresses(model: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]
