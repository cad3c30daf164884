"""The standby of a worker: a second copy of the memory that it decodes with, filled beside decoding.

What arrives is copied there as it comes, so a worker keeps its own part of a version and nothing else, and a commit is
copies of whole pieces of memory. A standby in place has no memory: what arrives is copied to where the worker decodes,
which stands still meanwhile, and a commit copies nothing.

Invariants: a publication fills every part of the standby, or it is not committed; one publication at a time fills it,
and one that was given up fills it no more; copies into it, out of it and out of what arrived are ordered by events, so
nobody waits for the GPU. It lies on the GPU; where that has no room for it, in pinned memory of the host, from which a
commit takes several times as long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch

from flotilla_generator.engine.vllm.live_regions import Digests, LiveRegions, Region, resolved
from flotilla_weights.group import SPARE_BYTES
from flotilla_weights.inbox import StagedModel

log = logging.getLogger(__name__)

ALIGNMENT = 256
COPIED_ALONE = 1 << 20
"""Bytes from which a piece is worth a copy of its own; smaller ones share launches."""
SUMMED_AT_ONCE = 256 << 20
"""Bytes of sums with adapters that exist at one time."""

Named = list[tuple[str, torch.Tensor]]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Standby:
    """The twin of all memory that some regions are in."""

    def __init__(self, regions: LiveRegions, on: torch.device | None) -> None:
        """Begin with a copy of what is live, which has the padding that no tensor fills; on None be in place."""
        self.regions = regions
        self.in_place = on is None
        self._device = next(iter(regions.memory())).device
        pieces = [] if on is None else regions.memory()
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory = _Memory(end, self._device if on is None else on)
        self._pairs = [
            (piece, self._memory.bytes[start : start + piece.nbytes].view(piece.dtype))
            for piece, start in zip(pieces, starts, strict=True)
        ]
        self._on_host = on is not None and on.type != self._device.type
        self._copies = _Copies.of(self._pairs, alone=self._on_host)
        twins = {piece.untyped_storage().data_ptr(): twin for piece, twin in self._pairs}
        self._places = {
            name: [(region, region.live if on is None else _same_part(region, twins)) for region in found]
            for name, found in regions.by_name.items()
        }
        self._plans: dict[int, _Plan] = {}
        """The plans for lists of tensors that come again, because a ring lends the same ones to every publication."""
        self._lock = threading.Lock()
        self._filling: Filling | None = None
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        self._filled = torch.cuda.Event() if cuda else None
        self._began = torch.cuda.Event(enable_timing=True) if cuda else None
        self._copied = torch.cuda.Event(enable_timing=True) if cuda else None
        self._still = torch.cuda.Event() if cuda and self.in_place else None
        if self._stream is not None:
            # The new memory may have been another's, whose last work is still queued on the present stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.beside_decoding():
            for piece, twin in self._pairs:
                twin.copy_(piece)
            self._record(self._filled)

    @classmethod
    def beside(cls, regions: LiveRegions, ring: int = 0) -> Self:
        """Return one on the GPU of these regions, or in host memory where it has no room; buckets take `ring` bytes."""
        device = next(iter(regions.memory())).device
        nbytes = sum(piece.nbytes for piece in regions.memory())
        needed = nbytes + max(SPARE_BYTES, ring)
        if device.type != "cuda" or needed <= torch.cuda.mem_get_info(device)[0]:
            return cls(regions, device)
        log.warning(
            "the GPU has no room for a second copy of this worker's %.1f GiB of weights: it waits in host memory, and "
            "a commit copies it from there; lower generator.memory_fraction or generator.kv_cache_gib",
            nbytes / (1 << 30),
        )
        return cls(regions, torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        """Return the memory that it takes."""
        return self._memory.bytes.nbytes

    def begin(self) -> Filling:
        """Begin with a publication, in place of one that was given up."""
        with self._lock:
            self._plans = {key: plan for key, plan in self._plans.items() if plan.used}
            for plan in self._plans.values():
                plan.used = False
            self._filling = Filling(self)
            return self._filling

    def stand_still(self) -> None:
        """Have what arrives in place wait for the steps that decode so far; called on the thread that decodes."""
        self._record(self._still)

    def forget_lent(self) -> None:
        """Let go of tensors that a group lent which is no more: the buckets of the next one need their memory."""
        with self._lock:
            self._plans = {}

    def commit(self) -> None:
        """Queue copies of all of it into the live memory, on the stream that decodes."""
        if self._filled is not None:
            torch.cuda.current_stream(self._device).wait_event(self._filled)
        self._record(self._began)
        with torch.no_grad():
            self._copies.queue()
        self._record(self._copied)

    @property
    def copies_s(self) -> float:
        """Return what the copies of the last commit took the GPU, once they have ended; a CPU makes them at once."""
        if self._began is None or self._copied is None:
            return 0.0
        return float(self._began.elapsed_time(self._copied)) / 1000

    def wait_for_commit(self) -> None:
        """Have the present stream wait until the copies of the last commit have ended."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def put(self, filling: Filling, named: Named, computed: Collection[str]) -> None:
        """Queue copies of this worker's parts of some tensors; those of GPUs may be written again behind them.

        The digests of `computed` tensors are taken here, those of other whole ones by who received them.
        """
        from_host = any(tensor.device != self._device for _, tensor in named)
        with self._lock, self.beside_decoding() if from_host else nullcontext(), torch.no_grad():
            if self._filling is not filling:
                raise RuntimeError("this publication was given up")
            if self._filled is not None:
                torch.cuda.current_stream(self._device).wait_event(self._filled)
            self.wait_for_commit()
            if self._still is not None:
                torch.cuda.current_stream(self._device).wait_event(self._still)
            known = self._plans.get(id(named))
            plan = known if known is not None and known.named is named else self._plan(named, computed)
            plan.used = True
            if not from_host and not computed:
                self._plans[id(named)] = plan
            filling.note(plan.whole)
            filling.note({name: self.regions.digests(name, parts) for name, parts in plan.parts})
            plan.copies.queue()
            self._record(self._filled)

    def _plan(self, named: Named, computed: Collection[str]) -> _Plan:
        pairs: Pairs = []
        whole: dict[str, torch.Tensor | None] = {}
        digested: list[tuple[str, list[torch.Tensor]]] = []
        for name, tensor in named:
            places = self._places[name]
            parts = [region.part_of(tensor).to(self._device) for region, _ in places]
            pairs += [(twin, part) for (_, twin), part in zip(places, parts, strict=True)]
            if name not in computed and self.regions.is_whole(name, tensor):
                whole[name] = None
            else:
                digested.append((name, parts))
        return _Plan(named, _Copies.of(pairs, alone=self._on_host, most=None), whole, digested)

    def wait_until_filled(self) -> None:
        """Wait on this thread until all that was put has been copied."""
        if self._filled is not None:
            self._filled.synchronize()

    def beside_decoding(self) -> AbstractContextManager[Any]:
        """Queue what follows on a stream of its own, where there are streams."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _record(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))


class Filling:
    """One publication on its way into a standby."""

    def __init__(self, standby: Standby) -> None:
        self.standby = standby
        self._pending: dict[str, torch.Tensor | None] = {}

    def put(self, named: Named) -> None:
        """Take tensors, as they arrive."""
        self.standby.put(self, named, ())

    def put_sums(self, staged: StagedModel, device: torch.device) -> None:
        """Take what becomes of resting weights with the adapters that arrived."""
        told = staged.digests
        computed = {name for name, _ in staged.weights if name not in told}
        with self.standby.beside_decoding():
            for batch in _batches(staged.tensors(device)):
                self.standby.put(self, batch, computed)

    def note(self, digests: Mapping[str, torch.Tensor | None]) -> None:
        """Keep the digests of the parts of tensors; those of whole tensors are told by who received them."""
        self._pending.update(digests)

    def settle(self, sent: dict[str, int]) -> Digests:
        """Wait for the copies; return the digests that the regions will have, of which `sent` are known."""
        missing = [name for name in self.standby.regions.by_name if name not in self._pending]
        if missing:
            raise RuntimeError(f"{missing[0]} did not arrive")
        self.standby.wait_until_filled()
        whole = {name: [sent[name]] for name, found in self._pending.items() if found is None}
        with self.standby.beside_decoding():
            return whole | resolved({n: found for n, found in self._pending.items() if found is not None})


class _Memory:
    """Bytes of a GPU, or bytes of the host that a GPU copies from at full speed."""

    def __init__(self, nbytes: int, on: torch.device) -> None:
        self._pinned = False
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=on)
        if on.type == "cpu" and torch.cuda.is_available() and nbytes > 0:
            # Not by torch's pinned memory, which takes up to twice as much.
            code = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), nbytes, 0))
            if code != 0:
                raise MemoryError(f"the driver does not pin {nbytes} bytes of the host, error {code}")
            self._pinned = True

    def __del__(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


def _same_part(region: Region, twins: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the part of a twin that a region is of its memory."""
    live = region.live
    twin = twins[live.untyped_storage().data_ptr()]
    return twin.as_strided(live.shape, live.stride(), twin.storage_offset() + live.storage_offset())


@dataclass
class _Plan:
    """Holds what has to be done with one list of tensors."""

    named: Named
    copies: _Copies
    whole: dict[str, torch.Tensor | None]
    """The tensors that have a digest of their own: names without a value."""
    parts: list[tuple[str, list[torch.Tensor]]]
    """The other tensors: names with the parts that have digests."""
    used: bool = False


class _Copies:
    """Copies in few launches: small pieces share some, unless they cross between host and GPU."""

    def __init__(self, shared: Pairs, alone: Pairs) -> None:
        self._targets = [target for target, _ in shared]
        self._sources = [source for _, source in shared]
        self._alone = alone

    @classmethod
    def of(cls, pairs: Pairs, *, alone: bool, most: int | None = COPIED_ALONE) -> Self:
        """Return the copies of pairs of target and source; those below `most` bytes share launches unless `alone`."""
        small = [not alone and _can_share(*pair, most) for pair in pairs]
        return cls(
            [pair for pair, shares in zip(pairs, small, strict=True) if shares],
            [pair for pair, shares in zip(pairs, small, strict=True) if not shares],
        )

    def queue(self) -> None:
        """Queue them on the present stream."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for target, source in self._alone:
            target.copy_(source, non_blocking=True)


def _can_share(target: torch.Tensor, source: torch.Tensor, most: int | None) -> bool:
    return (most is None or target.nbytes < most) and target.is_contiguous() and source.is_contiguous()


def _batches(named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        batch.append((name, tensor))
        size += tensor.nbytes
        if size >= SUMMED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
