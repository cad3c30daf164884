"""`Sender` and `Receiver`: weights from the ranks of a trainer to many processes, attested by digests.

The wire. Rank 0 sends, and opens a store on a port of its own, for members that prove the secret of the epoch
(`rendezvous.py`). All keys lie below `flotilla/<epoch>/`:

    gpu/<rank>      name of the member's GPU, where nccl was asked for
    member/<rank>   digest of the manifest that the member holds
    buckets/<rank>  where receivers on its GPU map the buckets of this sender
    cuda_ipc/...    counts of what went through those buckets (`same_gpu`)
    round/<n>       digest of the manifest that the n-th publication moves, set by rank 0 before it starts
    failed          the first failure that a member reports, "rank 2: what: why"; it ends the epoch for all

The receivers follow from rank 1 on, then the other ranks of the trainer. Each of these sends to the receivers on its
own GPU, through memory that both map; a rank without any takes part and sends nothing. All other receivers hear rank 0
by a raw c10d process group, gloo or nccl (`process_group.lanes_between`). All senders pack the same tensors, and each
takes their digests. A message is a bucket of the manifest (`manifest.buckets`): uint8, each tensor dense, row-major,
little-endian, at its slot's offset, padding undefined. Nothing else is sent: names, types and cuts are known from the
manifest. A member that fails leaves the epoch with its process groups closed and `failed` set; the others see one or
the other and end too. There is no recovery within an epoch.

A few buffers take the buckets in turn. By nccl all work of a publication is queued at once: the device's streams keep
packing, moving and digests in order, and the host waits at the end only.

Invariants: a receiver hands out fresh memory, unless its sink takes what is lent; digests are computed from what
arrived, respectively from what is sent, while other buckets are on the wire; every wait ends after `timeout_s` without
progress, naming what it waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Self

import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import FlotillaError, InvalidRequest, WeightsMismatch
from flotilla_core.gpu_shares import BUCKETS_UNDER_WAY
from flotilla_weights.digest import bucket_digests, prepare_digests, resolve
from flotilla_weights.manifest import Bucket, Manifest, Slot
from flotilla_weights.process_group import SENDER_RANK
from flotilla_weights.rendezvous import new_secret
from flotilla_weights.ring import Named, Ring, unpack
from flotilla_weights.wire import Link, Message

BACKENDS = {weights_pb2.WEIGHT_BACKEND_GLOO: "gloo", weights_pb2.WEIGHT_BACKEND_NCCL: "nccl"}
SPARE_BYTES = 3 << 30
"""Memory of a GPU that staged weights leave at least to other processes and to buckets on their way."""

Sink = Callable[[Named], None]
Rows = torch.Tensor | Sequence[torch.Tensor]
"""A tensor, or parts of it that hold its rows in order."""


class Sender:
    """The end of one rank of the trainer, in one epoch."""

    def __init__(self, link: Link, host: str, port: int, secret: bytes) -> None:
        """Become the sender of a rank's link; `connect` reaches the rendezvous of rank 0."""
        self._link = link
        self._round = 0
        self._device = torch.device("cpu")
        self._ring: Ring | None = None
        self.host = host
        self.port = port
        self.secret = secret
        """The secret that the members prove to its store."""

    @classmethod
    def listen(
        cls,
        host: str,
        epoch: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        senders: Sequence[int] = (SENDER_RANK,),
        secret: bytes = b"",
    ) -> Self:
        """Open the rendezvous of rank 0 on a free port of `host`, and return at once; without a secret it makes one."""
        link = Link(epoch, SENDER_RANK, world_size, backend, timeout_s, senders)
        secret = secret or new_secret()
        return cls(link, host, link.serve(host, secret), secret)

    @property
    def is_heard(self) -> bool:
        """Return whether some receiver hears this rank, once it is connected."""
        return bool(self._link.lanes)

    def connect(self, manifest: Manifest, device: torch.device | None = None) -> None:
        """Wait until every other member joined with the same manifest."""
        if self._link.rank != SENDER_RANK:
            self._link.dial(self.host, self.port, self.secret)
        self._device = _formed(self._link, self.host, manifest, device)

    def publish(self, manifest: Manifest, tensors: Iterable[tuple[str, Rows]]) -> list[int]:
        """Send full tensors in manifest order; returns their digests in that order.

        Floating-point numbers of another type than the manifest's are rounded to it. A rank that no receiver hears
        takes no tensor and has no digests.
        """
        self._link.require_formed()
        self._link.check_peers()
        self._round += 1
        if self._link.rank == SENDER_RANK:
            self._link.put(f"round/{self._round}", manifest.digest)
        if not self.is_heard:
            return []
        try:
            return self._sent(manifest, tensors)
        except (RuntimeError, FlotillaError) as error:
            # Out of memory, say: no member should wait until the timeout for what is not sent any more.
            self._link.fail("sending failed", why=f"{type(error).__name__}: {error}")
            raise

    def abort(self, why: str = "the sender gave the epoch up") -> None:
        """End the epoch for all members; a `connect` or `publish` in progress raises."""
        self._link.abort(why)

    def close(self) -> None:
        """Leave after the last publication."""
        self._link.close()

    def _sent(self, manifest: Manifest, tensors: Iterable[tuple[str, Rows]]) -> list[int]:
        ring = self._ring = _ring_for(manifest, self._device, self._ring)
        source = iter(tensors)
        digests: list[torch.Tensor] = []
        moving: list[tuple[Message, str]] = []
        for index, bucket in enumerate(manifest.buckets):
            if index >= BUCKETS_UNDER_WAY:
                self._link.follow(*moving[index - BUCKETS_UNDER_WAY])
            message = self._pack(ring, index, [self._next(slot, source) for slot in bucket.slots])
            what = f"sending bucket {index + 1} of {len(manifest.buckets)}"
            moving.append((self._link.broadcast(message), what))
            digests.append(bucket_digests(message, bucket.extents))
        for one in moving:
            self._link.finish(*one)
        return resolve(digests)

    @torch.no_grad()
    def _pack(self, ring: Ring, index: int, rows: list[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the bytes of a bucket; a single tensor that needs no rounding lies in them already."""
        first, spec = rows[0][0].detach(), ring.manifest.buckets[index].slots[0].spec
        if len(rows) == len(rows[0]) == 1 and (first.dtype, first.device) == (spec.torch_dtype, self._device):
            return first.contiguous().view(-1).view(torch.uint8)
        # Tensors of one GPU are copied and rounded in few launches.
        torch._foreach_copy_(ring.rows(index, rows), [part.detach() for parts in rows for part in parts])
        return ring.message(index)

    def _next(self, slot: Slot, source: Iterator[tuple[str, Rows]]) -> Sequence[torch.Tensor]:
        name, given = next(source, ("", None))
        if given is None:
            raise self._refuse("nothing", "one more tensor")
        parts = [given] if isinstance(given, torch.Tensor) else given
        spec, first = slot.spec, parts[0]
        shape = tuple(first.shape)
        if len(parts) > 1:
            shape = (sum(len(part) for part in parts), *first.shape[1:])
        rounded = first.is_floating_point() and spec.torch_dtype.is_floating_point
        if name != spec.name or shape != spec.shape or not (rounded or first.dtype == spec.torch_dtype):
            raise self._refuse(f"{name} {first.dtype} {shape}", f"{spec}")
        return parts

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
        senders = list(group.sender_ranks) or [SENDER_RANK]
        if backend is None or rank in senders:
            raise InvalidRequest(
                f"this weight group cannot be joined as rank {rank}",
                where=f"epoch {group.epoch}",
                why=f"backend {group.backend}, senders {senders}",
                next_step="use gloo or nccl, and a rank that does not send",
            )
        timeout_s = group.timeout.ToNanoseconds() / 1e9
        self._link = Link(group.epoch, rank, group.world_size, backend, timeout_s, senders)
        self._host, self._port, self._secret = group.host, group.port, group.secret
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._ring: Ring | None = None
        self._manifest = manifest
        self._round = 0
        self.buckets_received = 0

    def connect(self) -> None:
        """Enter the group; returns when it is complete."""
        self._link.dial(self._host, self._port, self._secret)
        self._device = _formed(self._link, self._host, self._manifest, self._device)
        if self._device.type == "cuda":
            self._stream = _stream_of(self._device)

    def receive(self, sink: Sink, manifest: Manifest | None = None, *, lent: bool = False) -> list[int]:
        """Take one publication; `sink` gets named tensors bucket by bucket. Returns the digests of what arrived.

        An error of the sink is raised after the last bucket: the other members are not held up by it.
        `manifest` is what the publication moves, where that is not what the group was joined with. With `lent` the
        memory of the tensors is written again after `sink` returned, and their numbers may still be on their way when
        it is called: it queues its copies on the current stream, which arranges both, and waits for nothing.
        """
        manifest = manifest or self._manifest
        self._link.check()
        self._round += 1
        self.buckets_received = 0
        moved = self._link.wait_for_key(f"round/{self._round}", "waiting for the sender to publish")
        if moved != manifest.digest:
            raise self._link.fail("the sender publishes something else", why="it announced another manifest")
        with self._on_its_stream():
            return self._taken(sink, manifest, lent)

    def has_room_for(self, nbytes: int) -> bool:
        """Return whether so many bytes fit into the memory of its GPU, beside a few buckets; a host has room."""
        device = self._device
        if device is None or device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return nbytes + max(SPARE_BYTES, self._manifest.ring_bytes) <= free + kept

    def abort(self, why: str = "the receiver gave the epoch up") -> None:
        """End the epoch for all members; a `connect` or `receive` in progress raises."""
        self._link.abort(why)

    def close(self) -> None:
        """Leave between two publications."""
        self._link.close()

    def _taken(self, sink: Sink, manifest: Manifest, lent: bool) -> list[int]:
        digests: list[torch.Tensor] = []
        failure: Exception | None = None
        try:
            for bucket, message, named in self._arrivals(manifest, lent):
                digests.append(bucket_digests(message, bucket.extents))
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

    def _arrivals(self, manifest: Manifest, lent: bool) -> Iterator[tuple[Bucket, torch.Tensor, Named]]:
        """Yield the buckets in order; those that are lent may still be on their way, in the order of the stream."""
        buckets, queued = manifest.buckets, lent and self._link.is_queued
        device = self._device or torch.device("cpu")
        ring = self._ring = _ring_for(manifest, device, self._ring) if lent else None
        moving: deque[tuple[Message, str]] = deque()
        messages: deque[torch.Tensor] = deque()
        for index in range(len(buckets) + BUCKETS_UNDER_WAY):
            arrived = index - BUCKETS_UNDER_WAY
            if messages and arrived >= 0:
                if queued:
                    self._link.follow(*moving[arrived])
                else:
                    self._finish(moving)
                bucket, message = buckets[arrived], messages.popleft()
                yield bucket, message, unpack(bucket, message) if ring is None else ring.tensors(arrived)
                del message
            if index < len(buckets):
                nbytes = buckets[index].nbytes
                messages.append(
                    torch.empty(nbytes, dtype=torch.uint8, device=device)
                    if ring is None
                    else ring.message(index)
                )
                what = f"receiving bucket {index + 1} of {len(buckets)}"
                moving.append((self._link.broadcast(messages[-1]), what))
        while moving:
            self._finish(moving)

    def _finish(self, moving: deque[tuple[Message, str]]) -> None:
        self._link.finish(*moving.popleft())
        self.buckets_received += 1


def _ring_for(manifest: Manifest, device: torch.device, last: Ring | None) -> Ring:
    """Return the ring of the last publication, if this one moves the same."""
    return last if last is not None and last.manifest.digest == manifest.digest else Ring(manifest, device)


def _formed(link: Link, host: str, manifest: Manifest, device: torch.device | None) -> torch.device:
    """Connect the group; return the device of its buckets."""
    link.form(host, manifest.digest, _device_for(link, device))
    buckets = _device_for(link, device)
    of_adapters = manifest.adapters.manifest.buckets if manifest.adapters is not None else ()
    prepare_digests(buckets, (bucket.extents for bucket in (*manifest.buckets, *of_adapters)))
    return buckets


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all groups of this process, so that each reuses the memory that the last one staged in.

    What arrives must not queue behind the work of whoever else uses this GPU in this process.
    """
    return torch.cuda.Stream(device, priority=-1)  # few and short kernels, which a decoder's need not delay


def _device_for(link: Link, device: torch.device | None) -> torch.device:
    """Return the device of the buckets: gloo moves host memory, the others move device memory."""
    if link.in_host_memory:
        return torch.device("cpu")
    return device if device is not None else torch.device("cuda", torch.cuda.current_device())
