"""The carrier of a lane whose members all sit on one GPU: the sender's buckets, mapped by every receiver.

A message is cut into pieces of one bucket each. The sender copies piece n into bucket n modulo their number and counts
it in `ready`; a receiver copies it out and counts it in `taken/<rank>`; the sender reuses a bucket when every receiver
has taken what was in it. Counts go through the lane's part of the store, and only after the device has ended the copy.
One question tells what was copied and waits for the other end's count, where nothing else is to do.

Invariants: the order of the messages is the same at both ends, and so are the pieces, because sizes come from the
manifest; no process waits on the device for another process; copies are queued on the stream of the thread that
moves the transfer on, never by a thread that only ends the group; a bucket is unmapped after the last copy out of it.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from flotilla.weights.v1 import store_pb2 as pb
from flotilla_core.gpu_shares import SAME_GPU_BUCKET_BYTES, SAME_GPU_BUCKETS
from flotilla_weights.process_group import Lane
from flotilla_weights.store import EpochStore

READY = "ready"
SLICE_S = 0.05
"""The longest wait for the other end: an abort of this one is seen between two of them."""

Ended = Callable[[], bool]
"""A function that returns whether the device has ended a copy."""


class Buckets(Protocol):
    """Memory that all members see, cut into equal buckets."""

    count: int
    nbytes: int

    def write(self, bucket: int, piece: torch.Tensor) -> Ended:
        """Start to copy a piece into a bucket."""

    def read(self, bucket: int, piece: torch.Tensor) -> Ended:
        """Start to copy a bucket into a piece."""

    def close(self) -> None:
        """Let go of the memory after the last copy."""


class DeviceBuckets:
    """Buckets in a GPU's memory, exported by the sender or mapped by a receiver."""

    def __init__(self, memory: torch.Tensor, count: int, nbytes: int, unmap: Callable[[], None]) -> None:
        self.count = count
        self.nbytes = nbytes
        self._memory = memory
        self._unmap = unmap
        self._last: Any = None

    def write(self, bucket: int, piece: torch.Tensor) -> Ended:
        return self._copied(self._part(bucket, piece), piece)

    def read(self, bucket: int, piece: torch.Tensor) -> Ended:
        return self._copied(piece, self._part(bucket, piece))

    def close(self) -> None:
        if self._last is not None:
            self._last.synchronize()
        self._unmap()

    def _part(self, bucket: int, piece: torch.Tensor) -> torch.Tensor:
        start = bucket * self.nbytes
        return self._memory[start : start + piece.numel()]

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> Ended:
        target.copy_(source, non_blocking=True)
        self._last = torch.cuda.Event()
        self._last.record(torch.cuda.current_stream(self._memory.device))
        ended: Ended = self._last.query
        return ended


class Transfer:
    """One message on its way."""

    def __init__(self, group: SameGpuGroup, last_piece: int) -> None:
        self._group = group
        self._last_piece = last_piece

    def is_completed(self) -> bool:
        """Return whether this end has nothing more to do with it; changes nothing."""
        return self._group.failure != "" or self._group.done >= self._last_piece

    def advance(self) -> bool:
        """Move the messages on as far as possible now; return whether that was anywhere."""
        return self._group.advance(self._last_piece)

    def wait(self) -> None:
        """Raise what ended the group."""
        if self._group.failure:
            raise RuntimeError(self._group.failure)


class SameGpuGroup:
    """One member's end."""

    def __init__(self, store: EpochStore, prefix: str, rank: int, lane: Lane, buckets: Buckets) -> None:
        self._store = store
        self._buckets = buckets
        self._sends = rank == lane.sender
        own, others = (READY, map(_taken, lane.receivers)) if self._sends else (_taken(rank), [READY])
        self._own = f"{prefix}/{own}"
        self._others = [f"{prefix}/{other}" for other in others]
        self._waiting: deque[torch.Tensor] = deque()
        self._copying: deque[Ended] = deque()
        self._queued = 0
        self._started = 0
        self._copied = 0
        self._told = 0
        """Pieces of the copied ones that this end has counted."""
        self._heard = 0
        """Pieces that the other end has counted: `ready`, or what every receiver has taken."""
        self._lock = threading.Lock()
        self.failure = ""
        store.add(self._own, 0)

    @property
    def done(self) -> int:
        """Pieces that every receiver has taken, at the sender; that this receiver has taken, at a receiver."""
        return self._heard if self._sends else self._copied

    def broadcast(self, tensors: list[torch.Tensor], _options: Any) -> Transfer:
        """Queue one message, whose first byte is that of the only tensor; only transfers that advance move it."""
        pieces = tensors[0].split(self._buckets.nbytes)
        self._waiting.extend(pieces)
        self._queued += len(pieces)
        return Transfer(self, self._queued)

    def advance(self, wanted: int) -> bool:
        """Start the copies that have a bucket and count those that ended; return whether there were any.

        Only for `wanted` pieces the other end is waited for.
        """
        with self._lock:
            if self.failure:
                return False
            try:
                return self._count_copies() | self._exchange(wanted) | self._start_copies()
            except RuntimeError as error:
                self.failure = str(error)
                return True

    def close(self) -> None:
        """Let go of the buckets; transfers in progress fail."""
        with self._lock:
            if self.failure != _CLOSED:
                self.failure = _CLOSED
                self._waiting.clear()
                self._copying.clear()
                self._buckets.close()

    def _start_copies(self) -> bool:
        started = self._started
        limit = self._heard + self._buckets.count if self._sends else self._heard
        while self._waiting and self._started < limit:
            copy = self._buckets.write if self._sends else self._buckets.read
            self._copying.append(copy(self._started % self._buckets.count, self._waiting.popleft()))
            self._started += 1
        return self._started > started

    def _count_copies(self) -> bool:
        copied = self._copied
        while self._copying and self._copying[0]():
            self._copying.popleft()
            self._copied += 1
        return self._copied > copied

    def _exchange(self, wanted: int) -> bool:
        """Tell what was copied, and hear the other end's count; wait for that where nothing else is to do."""
        untold = self._copied - self._told
        listens = self._heard < (self._copied if self._sends else self._queued)
        waits = listens and not self._copying and self.done < wanted
        if not untold and not waits:
            return False
        question = pb.AskRequest(change=pb.CHANGE_ADD, key=self._own, number=untold)
        self._told = self._copied
        if not waits:
            telling = self._store.start(question)
            if self._told == self._queued:
                self._store.ask(question, telling)  # no question follows that would fail where this one did
            return False
        question.awaited.extend(self._others)
        question.least, question.limit_s = self._heard + 1, SLICE_S
        answer = self._store.ask(question)
        self._heard = answer.number
        return answer.yes


def gpu_of(device: torch.device) -> str:
    """The name of the physical GPU behind a device of this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def own_buckets(device: torch.device) -> tuple[DeviceBuckets, str]:
    """The sender's buckets on a GPU, and what receivers need to map them."""
    memory = _exported(device)
    count, nbytes = SAME_GPU_BUCKETS, SAME_GPU_BUCKET_BYTES
    described = {"handle": memory.handle.hex(), "count": count, "nbytes": nbytes}
    return DeviceBuckets(memory.tensor, count, nbytes, lambda: None), json.dumps(described)


def mapped_buckets(description: str, device: torch.device) -> DeviceBuckets:
    """The sender's buckets, in a receiver on the same GPU."""
    from flotilla_weights.device_memory import MappedMemory

    described = json.loads(description)
    count, nbytes = described["count"], described["nbytes"]
    memory = MappedMemory(bytes.fromhex(described["handle"]), count * nbytes, device)
    return DeviceBuckets(memory.tensor, count, nbytes, memory.close)


def counters(lane: Lane) -> list[str]:
    """The keys that exist once every member sees the buckets."""
    return [READY, *(_taken(rank) for rank in lane.receivers)]


def _taken(rank: int) -> str:
    return f"taken/{rank}"


_CLOSED = "the group is closed"


@cache
def _exported(device: torch.device) -> Any:
    """One piece of memory for all groups that this process sends to, one after the other."""
    from flotilla_weights.device_memory import ExportedMemory

    return ExportedMemory(SAME_GPU_BUCKETS * SAME_GPU_BUCKET_BYTES, device)
