"""`Sender` and `Receiver`: weights from one process to many, attested by digests.

The wire. The sender opens a TCPStore on a port of its own; all keys of an epoch lie below `flotilla/<epoch>/`:

    gpu/<rank>      name of the member's GPU, where nccl was asked for
    member/<rank>   digest of the manifest that the member holds; rank 0 is the sender
    buckets         where receivers map the sender's buckets, on a GPU that all members share
    cuda_ipc/...    counts of what went through those buckets (`same_gpu`)
    round/<n>       digest of the manifest that the n-th publication moves, set by the sender before it starts
    failed          the first failure that a member reports, "rank 2: what: why"; it ends the epoch for all

Bytes travel as broadcasts from rank 0 over a raw c10d process group (gloo or nccl), or through memory that all members
map where they share one GPU: one uint8 message a bucket of the manifest (`manifest.buckets`: each tensor dense,
row-major, little-endian, at its slot's offset, padding undefined).
Nothing else is sent: names, types and cuts are known from the manifest. A member that fails leaves the epoch with its
process group closed and `failed` set; the others see one or the other and end too. There is no recovery within an
epoch.

Invariants: a receiver never hands out a buffer that is written again (fresh memory for each bucket); digests are
computed from what arrived, respectively from what is sent, bucket by bucket while the next bucket is on the wire;
every wait ends after `timeout_s` without progress, naming what it waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Self

import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import FlotillaError, InvalidRequest, WeightsMismatch
from flotilla_weights.digest import kernel_works, pending_digests, resolve
from flotilla_weights.manifest import Bucket, Manifest, Slot
from flotilla_weights.process_group import GLOO, SENDER_RANK
from flotilla_weights.wire import Link

BACKENDS = {weights_pb2.WEIGHT_BACKEND_GLOO: "gloo", weights_pb2.WEIGHT_BACKEND_NCCL: "nccl"}
ON_THE_WIRE = 2
"""Buckets in flight: one moves while the next is packed, or the last one digested."""
SPARE_BYTES = 1 << 30
"""Memory of a GPU that staged weights leave to buckets on their way and to other processes."""

Sink = Callable[[list[tuple[str, torch.Tensor]]], None]


class Sender:
    """The trainer's end: rank 0 of one epoch."""

    def __init__(self, link: Link, host: str, port: int) -> None:
        self._link = link
        self._round = 0
        self._device = torch.device("cpu")
        self.host = host
        self.port = port

    @classmethod
    def listen(cls, host: str, epoch: int, world_size: int, backend: str, timeout_s: float) -> Self:
        """Open the rendezvous on a free port of `host`; returns at once."""
        link = Link(epoch, SENDER_RANK, world_size, backend, timeout_s)
        return cls(link, host, link.serve(host))

    def connect(self, manifest: Manifest, device: torch.device | None = None) -> None:
        """Wait until every receiver joined with the same manifest."""
        self._device = _formed(self._link, self.host, manifest, device)

    def publish(self, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[int]:
        """Send full tensors in manifest order; returns their digests in that order.

        Floating-point numbers of another type than the manifest's are rounded to it.
        """
        self._link.check_peers()
        self._round += 1
        self._link.put(f"round/{self._round}", manifest.digest)
        source = iter(tensors)
        digests: list[torch.Tensor] = []
        wire: deque[tuple[Any, str]] = deque()
        for index, bucket in enumerate(manifest.buckets):
            message = self._pack(bucket, source, digests)
            if len(wire) == ON_THE_WIRE:
                self._link.finish(*wire.popleft())
            wire.append(
                (self._link.broadcast(message), f"sending bucket {index + 1} of {len(manifest.buckets)}")
            )
        while wire:
            self._link.finish(*wire.popleft())
        return resolve(digests)

    def abort(self, why: str = "the sender gave the epoch up") -> None:
        """End the epoch for all members; a `connect` or `publish` in progress raises."""
        self._link.abort(why)

    def close(self) -> None:
        """Leave after the last publication."""
        self._link.close()

    def _pack(
        self, bucket: Bucket, source: Iterator[tuple[str, torch.Tensor]], digests: list[torch.Tensor]
    ) -> torch.Tensor:
        tensors = [self._next(slot, source) for slot in bucket.slots]
        first = tensors[0].detach()
        if len(tensors) == 1 and first.dtype == bucket.slots[0].spec.torch_dtype:
            message = first.to(self._device).contiguous().view(-1).view(torch.uint8)
        else:
            message = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            _fill([tensor for _, tensor in _unpack(bucket, message)], tensors)
        digests.append(pending_digests([tensor for _, tensor in _unpack(bucket, message)]))
        return message

    def _next(self, slot: Slot, source: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        name, tensor = next(source, ("", None))
        if tensor is None:
            raise self._refuse("nothing", "one more tensor")
        spec = slot.spec
        rounded = tensor.is_floating_point() and spec.torch_dtype.is_floating_point
        if (
            name != spec.name
            or tuple(tensor.shape) != spec.shape
            or not (rounded or tensor.dtype == spec.torch_dtype)
        ):
            raise self._refuse(f"{name} {tensor.dtype} {tuple(tensor.shape)}", f"{spec}")
        return tensor

    def _refuse(self, given: str, expected: str) -> FlotillaError:
        error = WeightsMismatch(
            "the tensors to publish differ from the manifest", why=f"{given} instead of {expected}"
        )
        self._link.abort(str(error))
        return error


class Receiver:
    """A generator worker's end of one epoch."""

    def __init__(
        self,
        group: weights_pb2.WeightGroup,
        rank: int,
        manifest: Manifest,
        device: torch.device | None = None,
    ) -> None:
        backend = BACKENDS.get(group.backend)
        if backend is None or list(group.sender_ranks) not in ([], [SENDER_RANK]):
            raise InvalidRequest(
                "this weight group cannot be joined",
                where=f"epoch {group.epoch}",
                why=f"backend {group.backend}, senders {list(group.sender_ranks)}",
                next_step="use gloo or nccl with rank 0 as the sender",
            )
        self._link = Link(group.epoch, rank, group.world_size, backend, group.timeout.ToNanoseconds() / 1e9)
        self._host, self._port = group.host, group.port
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._manifest = manifest
        self._round = 0
        self.buckets_received = 0

    def connect(self) -> None:
        """Enter the group; returns when it is complete."""
        self._link.dial(self._host, self._port)
        self._device = _formed(self._link, self._host, self._manifest, self._device)
        if self._device.type == "cuda":
            self._stream = _stream_of(self._device)

    def receive(self, sink: Sink, manifest: Manifest | None = None) -> list[int]:
        """Take one publication; `sink` gets named tensors bucket by bucket. Returns the digests of what arrived.

        An error of the sink is raised after the last bucket: the other members are not held up by it.
        `manifest` is what the publication moves, where that is not what the group was joined with.
        """
        manifest = manifest or self._manifest
        self._link.check()
        self._round += 1
        self.buckets_received = 0
        moved = self._link.wait_for_key(f"round/{self._round}", "waiting for the sender to publish")
        if moved != manifest.digest:
            raise self._link.fail("the sender publishes something else", why="it announced another manifest")
        with self._on_its_stream():
            return self._taken(sink, manifest)

    def has_room_for(self, nbytes: int) -> bool:
        """Return whether so many bytes fit into the memory of its GPU, beside a few buckets; a host has room."""
        device = self._device
        if device is None or device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return nbytes + SPARE_BYTES <= free + kept

    def abort(self, why: str = "the receiver gave the epoch up") -> None:
        """End the epoch for all members; a `connect` or `receive` in progress raises."""
        self._link.abort(why)

    def close(self) -> None:
        """Leave between two publications."""
        self._link.close()

    def _taken(self, sink: Sink, manifest: Manifest) -> list[int]:
        digests: list[torch.Tensor] = []
        failure: Exception | None = None
        try:
            for named in self._arrivals(manifest.buckets):
                digests.append(pending_digests([tensor for _, tensor in named]))
                self.buckets_received += 1
                if failure is None:
                    try:
                        sink(named)
                    # Whatever the sink raises must not stall the other members.
                    except Exception as error:  # noqa: BLE001
                        failure = error
        except Exception as error:
            # Out of memory, say: no member should wait until the timeout for what is not taken any more.
            self._link.fail("receiving failed", why=f"{type(error).__name__}: {error}")
            failure = None  # as below
            raise
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # its traceback holds this frame, and with it all that arrived
        return resolve(digests)

    def _on_its_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _arrivals(self, buckets: tuple[Bucket, ...]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        wire: deque[tuple[Any, Bucket, torch.Tensor]] = deque()
        for index in range(len(buckets) + ON_THE_WIRE):
            if len(wire) == ON_THE_WIRE or index >= len(buckets):
                if not wire:
                    return
                work, bucket, message = wire.popleft()
                self._link.finish(work, f"receiving bucket {self.buckets_received + 1} of {len(buckets)}")
                yield _unpack(bucket, message)
            if index < len(buckets):
                message = torch.empty(buckets[index].nbytes, dtype=torch.uint8, device=self._device)
                wire.append((self._link.broadcast(message), buckets[index], message))


def _unpack(bucket: Bucket, message: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [
        (
            slot.spec.name,
            message[slot.offset : slot.offset + slot.spec.nbytes]
            .view(slot.spec.torch_dtype)
            .view(slot.spec.shape),
        )
        for slot in bucket.slots
    ]


def _fill(targets: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy and round; tensors of one GPU in few launches."""
    with torch.no_grad():
        torch._foreach_copy_(targets, [tensor.detach() for tensor in tensors])


def _formed(link: Link, host: str, manifest: Manifest, device: torch.device | None) -> torch.device:
    """Connect the group; return the device of its buckets."""
    link.form(host, manifest.digest, _device_for(link.backend, device))
    buckets = _device_for(link.backend, device)
    if buckets.type == "cuda":
        kernel_works(buckets)  # compiled now, when nobody waits for digests
    return buckets


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all groups of this process, so that each reuses the memory that the last one staged in.

    What arrives must not queue behind the work of whoever else uses this GPU in this process.
    """
    return torch.cuda.Stream(device)


def _device_for(backend: str, device: torch.device | None) -> torch.device:
    """Return the device of the buckets: gloo moves host memory, the others move device memory."""
    if backend == GLOO:
        return torch.device("cpu")
    return device if device is not None else torch.device("cuda", torch.cuda.current_device())
