"""The part of the sender's model that a member of a weight group holds, between the wire and the live weights.

Invariants: a publication replaces what was staged before it, as a whole or not at all; it waits in the memory of the
receiver's device where there is room beside the live model, and in that of the host otherwise; the weights under
adapters come with the first publication of a group, rest in host memory and go with the group, so adapters never meet
weights that another group brought; each digest is of what arrived, those of resting weights included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from flotilla_weights.adapters import AdapterNames, merged
from flotilla_weights.group import Receiver
from flotilla_weights.manifest import Manifest

log = logging.getLogger(__name__)

Named = list[tuple[str, torch.Tensor]]
Progress = Callable[[int], None]
Keep = Callable[[Named], None]
"""Queues copies of tensors before it returns: their memory is written again afterwards."""


class StagedModel:
    """Every tensor of one version under its name in the checkpoint; sums with adapters are made on demand."""

    def __init__(
        self, weights: Named, digests: list[int], adapters: dict[str, torch.Tensor], scale: float
    ) -> None:
        self.weights = weights
        """The tensors as they were sent, without adapters."""
        self._digests = digests
        self._adapters = adapters
        self._scale = scale

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, one after the other; sums are made on `device`."""
        for name, weight in self.weights:
            names = AdapterNames.of(name)
            if names.a in self._adapters:
                a, b = (self._adapters[adapter].to(device) for adapter in names)
                yield name, merged(weight.to(device), a, b, self._scale)
            else:
                yield name, weight

    def as_sent(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that no adapter changes."""
        for name, weight in self.weights:
            if AdapterNames.of(name).a not in self._adapters:
                yield name, weight

    @property
    def digests(self) -> dict[str, int]:
        """The digests of those."""
        sent = zip(self.weights, self._digests, strict=True)
        return {name: digest for (name, _), digest in sent if AdapterNames.of(name).a not in self._adapters}


class Inbox:
    """The receiving end of one group, with what it brought."""

    def __init__(self, receiver: Receiver, manifest: Manifest) -> None:
        self._receiver = receiver
        self._manifest = manifest
        self._resting: Named = []
        self._resting_digests: list[int] = []
        self._earlier_buckets = 0
        self._told = False
        self.staged: StagedModel | None = None
        """The last publication, until it is taken."""
        self.digests: list[int] = []
        """The digests of all its tensors, in the order of the manifest, adapters last."""

    @property
    def buckets_received(self) -> int:
        """Messages of the publication under way."""
        return self._earlier_buckets + self._receiver.buckets_received

    @property
    def told(self) -> dict[str, int]:
        """The digests of the last publication by the names of their tensors."""
        return dict(zip((spec.name for spec in self._manifest.all_tensors), self.digests, strict=True))

    def receive(
        self,
        progress: Progress = lambda buckets: None,
        keep: Keep | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        """Take one publication; `progress` receives the count of its messages as they are staged.

        Where `keep` is given, it takes tensors as they arrive, and nothing is staged but what has adapters. What is
        staged waits in host memory where the device has no room, or nobody planned any (`on_host`).
        """
        self.staged, self.digests, self._earlier_buckets = None, [], 0
        adapters = self._manifest.adapters
        if adapters is None and keep is not None:
            self.digests = self._receiver.receive(keep, lent=True)
            return
        if adapters is None:
            crowded = not on_host and not self._receiver.has_room_for(self._manifest.nbytes)
            if crowded and not self._told:
                self._told = True
                log.warning(
                    "the GPU has no room for %.1f GiB of staged weights: they wait in host memory, and each commit "
                    "copies them back, which takes seconds; lower generator.memory_fraction",
                    self._manifest.nbytes / (1 << 30),
                )
            weights, self.digests = self._moved(self._manifest, progress, to_host=on_host or crowded)
            self.staged = StagedModel(weights, self.digests, {}, 0.0)
            return
        if not self._resting:
            resting, self._resting_digests = self._moved(self._manifest, progress, to_host=True)
            self._earlier_buckets, self._resting = len(self._manifest.buckets), resting
        arrived, digests = self._moved(adapters.manifest, progress)
        self.digests = self._resting_digests + digests
        self.staged = StagedModel(self._resting, self._resting_digests, dict(arrived), adapters.scale)

    def take(self) -> StagedModel | None:
        """Return the staged model and unstage it; its digests stay until the next publication."""
        staged, self.staged = self.staged, None
        return staged

    def _moved(
        self, manifest: Manifest, progress: Progress, *, to_host: bool = False
    ) -> tuple[Named, list[int]]:
        arrived: Named = []

        def sink(named: Named) -> None:
            arrived.extend((name, tensor.cpu() if to_host else tensor) for name, tensor in named)
            progress(self.buckets_received)

        return arrived, self._receiver.receive(sink, manifest)
