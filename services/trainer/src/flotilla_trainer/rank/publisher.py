"""Send the policy to the generators: all ranks gather the weights, and those that a generator hears send them.

Rank 0 sends to all generators on other GPUs than the ranks', and each rank to those on its own GPU.

The first publication of a frozen model to a group carries the weights and the adapters, every later one only the
adapters.

Invariants: every rank walks all tensors in one order, whatever happens on the wire, so a failed receiver or an aborted
publication costs only the weight group, never the ranks; only `publish` blocks, and `abort`, which may come from
another thread, ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from flotilla_core import telemetry
from flotilla_core.errors import FailedPrecondition, FlotillaError
from flotilla_core.telemetry import names
from flotilla_trainer.rank.checkpoint_layout import CheckpointLayout
from flotilla_trainer.rank.link import FrontLink
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_weights.group import Sender
from flotilla_weights.manifest import Manifest
from flotilla_weights.wire import Link


@dataclass
class _OpenGroup:
    """The open weight group of one epoch, on a rank that may send."""

    epoch: int
    sender: Sender
    joining: threading.Thread
    failure: FlotillaError | None = None


class Publisher:
    """This rank's part in weight groups, of which at most one is open."""

    def __init__(self, model: ShardedModel, link: FrontLink) -> None:
        self._model = model
        self._link = link
        self._group: _OpenGroup | None = None
        self._frozen_sent = False
        self._frozen_digests: list[int] = []
        self._made: tuple[int, Manifest] | None = None

    def open(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Listen for a new epoch on rank 0, and let the members join in the background."""
        self.abort("a newer weight group was opened")
        self._frozen_sent, self._made = False, None
        senders, rank = fields["senders"], dist.get_rank()
        manifest = self._manifest(fields["bucket_bytes"])
        epoch, described = (
            fields["epoch"],
            (fields["world_size"], fields["backend"], fields["timeout_s"], senders),
        )
        secret = bytes.fromhex(fields["secret"])
        sender: Sender | None = None
        try:
            if rank == 0:
                sender = Sender.listen(fields["host"], epoch, *described, secret)
        finally:
            # The other ranks wait for the port, also where there is none.
            port = self._told(0 if sender is None else sender.port) if len(senders) > 1 else 0
        if rank > 0:
            if rank >= len(senders) or port == 0:
                return {}
            sender = Sender(Link(epoch, senders[rank], *described), fields["host"], port, secret)
        assert sender is not None, "rank 0 listens"
        group = _OpenGroup(epoch, sender, threading.current_thread())
        group.joining = threading.Thread(
            target=self._join, args=(group, manifest), name=f"weights-join-{group.epoch}", daemon=True
        )
        self._group = group
        group.joining.start()
        return {
            "host": sender.host,
            "port": sender.port,
            "manifest": manifest.to_proto().SerializeToString().hex(),
        }

    def publish(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Send the current weights to the open group; return the digests of what this rank sent, if it sends."""
        manifest = self._manifest(fields["bucket_bytes"])
        tensors = iter(()) if self._frozen_sent else self._gather(manifest)
        try:
            with telemetry.span(names.TRAINER_PUBLISH, attributes={names.EPOCH: fields["epoch"]}) as span:
                if self._group is None and dist.get_rank() > 0:
                    return {}
                sender = self._joined(fields["epoch"])
                digests, nbytes = self._send(sender, manifest, tensors)
                if not sender.is_heard:
                    return {}
                span.set_attribute(names.BYTES, nbytes)
                return {"digests": digests, "bytes": nbytes, "manifest_digest": manifest.digest}
        finally:
            # The other ranks take part in these gathers, so every rank finishes them, whatever the wire does.
            for _ in tensors:
                pass
            # Every rank sets the same value, also where the sending failed: a failure ends the group.
            self._frozen_sent = self._model.frozen

    def abort(self, why: str) -> None:
        """Abort the open group; any thread may call this."""
        group, self._group = self._group, None
        if group is not None:
            group.sender.abort(why)

    def _send(
        self, sender: Sender, manifest: Manifest, tensors: Iterator[tuple[str, list[torch.Tensor]]]
    ) -> tuple[list[int], int]:
        """Send the tensors of the manifest; return all digests and the bytes that moved."""
        if self._frozen_sent:
            digests, nbytes = self._frozen_digests, 0
        else:
            digests, nbytes = sender.publish(manifest, tensors), manifest.nbytes
        if manifest.adapters is None or self._model.adapters is None:
            return digests, nbytes
        self._frozen_digests = digests
        ours, moved = self._model.adapters.tensors(), manifest.adapters.manifest
        digests = digests + sender.publish(moved, ((spec.name, ours[spec.name]) for spec in moved.tensors))
        return digests, nbytes + moved.nbytes

    def _gather(self, manifest: Manifest) -> Iterator[tuple[str, list[torch.Tensor]]]:
        groups = [[slot.spec.name for slot in bucket.slots] for bucket in manifest.buckets]
        gather = partial(self._model.rows_to_round, dtype=self._model.dtype)
        for name, rows in self._layout.rows(groups, gather):
            self._link.progress(f"publishing {name}")
            yield name, rows

    def _told(self, port: int) -> int:
        """Return rank 0's port on every rank; a collective."""
        told = torch.tensor(port, device=self._model.device)
        dist.broadcast(told, 0)
        return int(told)

    def _manifest(self, bucket_bytes: int) -> Manifest:
        """Return the manifest of the open group; it is made once, because its checks take longer than small models."""
        if self._made is None or self._made[0] != bucket_bytes:
            self._made = bucket_bytes, self._new_manifest(bucket_bytes)
        return self._made[1]

    def _new_manifest(self, bucket_bytes: int) -> Manifest:
        specs = self._layout.specs(self._model.specs(self._model.dtype))
        manifest = Manifest.from_named(specs, bucket_bytes).in_enough_buckets()
        adapters = self._model.adapters
        if adapters is None:
            return manifest
        specs = [(name, tensor.dtype, tensor.shape) for name, tensor in adapters.tensors().items()]
        return manifest.with_adapters(Manifest.from_named(specs, bucket_bytes), adapters.scale)

    @cached_property
    def _layout(self) -> CheckpointLayout:
        """Return where a checkpoint's tensors lie in the model; refuse a model that stores them in another form."""
        causal_lm = self._model.causal_lm
        assert isinstance(causal_lm, PreTrainedModel), "the front publishes policies alone"
        return CheckpointLayout.of(causal_lm, self._model.specs(self._model.dtype))

    def _join(self, group: _OpenGroup, manifest: Manifest) -> None:
        try:
            group.sender.connect(manifest, self._model.device)
        except FlotillaError as error:
            group.failure = error

    def _joined(self, epoch: int) -> Sender:
        """Wait until every member has joined the open group, and return its sender."""
        group = self._group
        if group is None or group.epoch != epoch:
            raise FailedPrecondition(
                f"no weight group of epoch {epoch} is open", next_step="call OpenWeightGroup first"
            )
        self._link.progress(f"waiting for the members of weight group {epoch}")
        group.joining.join()
        if group.failure is not None:
            raise group.failure
        return group.sender
