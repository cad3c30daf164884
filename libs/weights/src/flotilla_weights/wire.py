"""The transport under `Sender` and `Receiver`: the lanes of one epoch that a member is part of, and their store.

A generator's member is part of one lane. A rank of the trainer is part of the lane of its GPU, if a generator shares
that; the first rank also of the one to all that share a GPU with no rank; some ranks send to nobody.

Invariants: every wait has a deadline of `timeout_s`, watches for a failure that any member reported, and ends within
50 ms once this end is aborted; after the first failure the link stays dead (a new epoch makes a new one), and
what a broken transfer had received is freed with the error that it raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from copy import copy
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore

from flotilla.weights.v1 import store_pb2
from flotilla_core.addresses import joined
from flotilla_core.errors import (
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
    Unavailable,
    WeightGroupFailed,
)
from flotilla_weights.process_group import (
    CUDA_IPC,
    GLOO,
    NCCL,
    SENDER_RANK,
    Lane,
    connected_group,
    lanes_between,
    let_go,
    pause_over,
)
from flotilla_weights.rendezvous import LOOK_EVERY_S, open_store, reach_store
from flotilla_weights.same_gpu import Buckets, SameGpuGroup, counters, gpu_of, mapped_buckets, own_buckets
from flotilla_weights.store import EpochStore

STORE_CHECK_EVERY_S = 0.25


class Part(NamedTuple):
    """A buffer on its way on one lane."""

    carrier: str
    group: Any
    work: Any


Message = list[Part]
"""One buffer on its way on all lanes of this member."""


class Link:
    """One member's end of the group."""

    def __init__(
        self,
        epoch: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        senders: Sequence[int] = (SENDER_RANK,),
    ) -> None:
        if backend not in (GLOO, NCCL):
            raise InvalidRequest(f"no weight backend {backend!r}", next_step="use gloo or nccl")
        if backend == NCCL and not torch.cuda.is_available():
            raise FailedPrecondition(
                "weights cannot travel by nccl here",
                where="backend",
                why="nccl moves the memory of GPUs, and this process sees none",
                next_step="use gloo",
            )
        if not 0 <= rank < world_size or world_size < 2:
            raise InvalidRequest(f"rank {rank} does not fit into a weight group of {world_size}")
        if senders[0] != SENDER_RANK or len(set(senders)) < len(senders) or max(senders) >= world_size:
            raise InvalidRequest(
                f"ranks {list(senders)} cannot send in a weight group of {world_size}",
                why="rank 0, which opens the rendezvous, comes first, and each rank of the group once at most",
            )
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self._senders = tuple(senders)
        self.lanes: tuple[Lane, ...] = ()
        """The lanes that this member is part of, once the group is formed; those through a GPU's memory come first."""
        self._root: EpochStore | None = None
        """The store itself, kept for as long as the groups: torch calls it, but does not keep it alive."""
        self._store: PrefixStore | None = None
        self._groups: list[tuple[Lane, Any]] = []
        self._formed = False
        self._pending: Message = []
        self._cause: FlotillaError | None = None
        self._lock = threading.Lock()
        self._next_check = 0.0

    def serve(self, host: str, secret: bytes) -> int:
        """Open the rendezvous store on a free port of `host`, for members that know the secret."""
        what = f"the store of weight group epoch {self.epoch}"
        self._root, port = open_store(host, self.timeout_s, secret, what)
        self._store = PrefixStore(self._prefix, self._root)
        return port

    def dial(self, host: str, port: int, secret: bytes) -> None:
        """Reach the sender's store, which is open before its address is published."""
        try:
            self._root = reach_store(host, port, self.timeout_s, secret, self.check)
        except (OSError, RuntimeError) as error:
            # Nothing of the group's yet: a member that does not reach the sender is the one that fails.
            raise self._end(
                Unavailable(f"the sender's store at {joined(host, port)} does not answer", why=_brief(error))
            ) from error
        self._store = PrefixStore(self._prefix, self._root)

    @property
    def _prefix(self) -> str:
        return f"flotilla/{self.epoch}"

    @property
    def in_host_memory(self) -> bool:
        """Return whether what moves lies in the memory of the hosts."""
        return self.backend == GLOO or any(lane.carrier == GLOO for lane in self.lanes)

    @property
    def is_queued(self) -> bool:
        """Return whether transfers are queued on the device, in order with the other work of its streams."""
        return all(lane.carrier == NCCL for lane in self.lanes)

    def form(self, peer_host: str, credential: str, device: torch.device) -> None:
        """Meet all members, check that they hold the same `credential`, choose the lanes, connect them."""
        if self.backend == NCCL:
            self.put(f"gpu/{self.rank}", gpu_of(device))
        self.put(f"member/{self.rank}", credential)
        keys = [f"member/{rank}" for rank in range(self.world_size)]
        self._wait_for_keys(keys, lambda: f"waiting for {self._absent()} to join")
        for rank in range(self.world_size):
            if self._get(f"member/{rank}") != credential:
                raise self.fail(
                    f"rank {rank} joined with another manifest", why="names, types, shapes or order differ"
                )
        gpus = [self._get(f"gpu/{rank}") for rank in range(self.world_size)] if self.backend == NCCL else []
        lanes = lanes_between(self.backend, self.world_size, self._senders, gpus)
        self.lanes = tuple(lane for lane in lanes if self.rank in lane.ranks)
        for lane in self.lanes:
            group = self._connected(lane, peer_host, device)
            with self._lock:
                self._groups.append((lane, group))
            if self._cause is not None:
                # Another thread ended the link in between and could not know of this group.
                let_go(group, lane.carrier, [])
                self.check()
        for lane, group in list(self._groups):
            self._open(lane, group, device)
        self._formed = True

    def _connected(self, lane: Lane, peer_host: str, device: torch.device) -> Any:
        try:
            if lane.carrier == CUDA_IPC:
                buckets = self._shared_buckets(lane, device)
                prefix = f"{self._prefix}/{lane.key}"
                return SameGpuGroup(self._required_root(), prefix, self.rank, lane, buckets)
            return connected_group(
                lane.carrier,
                self._store_of(lane),
                lane.ranks.index(self.rank),
                len(lane.ranks),
                peer_host=peer_host,
                device=device,
                timeout_s=self.timeout_s,
            )
        except (RuntimeError, OSError) as error:
            advice = "; weights.backend: gloo does without CUDA IPC" if lane.carrier == CUDA_IPC else ""
            raise self.fail("the group could not be connected", why=_brief(error) + advice) from error

    def _shared_buckets(self, lane: Lane, device: torch.device) -> Buckets:
        """Return the sender's buckets, its own ones or as this receiver maps them."""
        key = f"buckets/{lane.sender}"
        if self.rank != lane.sender:
            return mapped_buckets(self.wait_for_key(key, "waiting for the sender's buckets"), device)
        buckets, description = own_buckets(device)
        self.put(key, description)
        return buckets

    def _open(self, lane: Lane, group: Any, device: torch.device) -> None:
        """Wait until the lane's first message can move at full speed."""
        if lane.carrier == CUDA_IPC:
            keys = [f"{lane.key}/{key}" for key in counters(lane)]
            self._wait_for_keys(keys, lambda: "waiting for every member to map the buckets")
        elif lane.carrier == NCCL:
            # Its members connect with their first message.
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            self.finish([self._started(lane, group, first)], "connecting the members")

    def broadcast(self, tensor: torch.Tensor) -> Message:
        """Start moving one buffer from the sender of each lane; `finish` it."""
        self.check()
        if self.rank in self._senders and time.monotonic() >= self._next_check:
            self.check_peers()
        self.require_formed()
        return [self._started(lane, group, tensor) for lane, group in list(self._groups)]

    def require_formed(self) -> None:
        """Raise before the members have met, which ends the link."""
        if not self._formed:
            raise self.fail("the group is not connected")

    def _started(self, lane: Lane, group: Any, tensor: torch.Tensor) -> Part:
        options = BroadcastOptions()
        options.rootRank = 0  # of the lane's own ranks
        options.rootTensor = 0
        try:
            part = Part(lane.carrier, group, group.broadcast([tensor], options))
        except RuntimeError as error:
            raise self.fail("a transfer could not be started", why=_brief(error)) from error
        with self._lock:
            self._pending.append(part)
        if self._cause is not None:
            # Another thread ended the link in between and could not know of this transfer.
            let_go(group, lane.carrier, [part.work])
            self.check()
        return part

    def follow(self, message: Message, what: str) -> None:
        """Have what this thread does or queues next come after a transfer; where transfers are queued it goes on."""
        if not self.is_queued:
            self.finish(message, what)
            return
        for part in message:
            self._joined(part, what)

    def finish(self, message: Message, what: str) -> None:
        """Wait for one transfer."""
        self.check()
        for part in message:
            self.wait(part.work.is_completed, lambda: what, pause_over(part.work, part.carrier))
            self.check()  # completed or not, an aborted epoch delivers nothing more
            with self._lock:
                self._pending = [other for other in self._pending if other is not part]
            self._joined(part, what)

    def _joined(self, part: Part, what: str) -> None:
        try:
            part.work.wait()
        except RuntimeError as error:
            self.check_peers()  # a member that leaves says why before its connections close
            raise self.fail(f"{what} failed", why=_brief(error)) from error

    def put(self, key: str, value: str) -> None:
        """Tell all members something."""
        self._ask(lambda store: store.set(key, value))

    def wait_for_key(self, key: str, what: str) -> str:
        """Wait until the sender has told something, and return it."""
        self._wait_for_keys([key], lambda: what)
        return self._get(key)

    def _wait_for_keys(self, keys: list[str], what: Callable[[], str]) -> None:
        """Wait until members have told all of these; the store answers as soon as they have."""
        root, whole = self._required_root(), [f"{self._prefix}/{key}" for key in keys]
        # The store answers later than this end gives up.
        question = store_pb2.AskRequest(awaited=root.unknown(whole), limit_s=2 * self.timeout_s)
        pending = root.start(question)
        try:
            self.wait(pending.done, what, lambda _: futures.wait([pending], LOOK_EVERY_S))
        finally:
            pending.cancel()
        self._ask(lambda _: root.ask(question, pending))

    def wait(self, done: Callable[[], bool], what: Callable[[], str], pause: Callable[[int], Any]) -> None:
        """Ask for `done` between two pauses within the deadline, watching for aborts and for failures of others."""
        deadline = time.monotonic() + self.timeout_s
        next_check = time.monotonic() + STORE_CHECK_EVERY_S
        looks = 0
        while not done():
            self.check()
            now = time.monotonic()
            if now >= deadline:
                raise self.fail(f"no progress for {self.timeout_s:g} s", why=what())
            if now >= next_check:
                self.check_peers()
                next_check = now + STORE_CHECK_EVERY_S
            pause(looks)
            looks += 1

    def check(self) -> None:
        """Raise what ended this link."""
        if self._cause is not None:
            raise copy(self._cause)

    def check_peers(self) -> None:
        """Raise when some member reported a failure, or the sender's store is gone."""
        self._next_check = time.monotonic() + STORE_CHECK_EVERY_S
        if self._has(["failed"]):
            raise self._end(
                WeightGroupFailed("another member of the weight group failed", why=self._get("failed"))
            )

    def fail(self, what: str, *, why: str = "") -> FlotillaError:
        """End the link, tell the other members, return the error to raise."""
        if self._cause is not None:
            return copy(self._cause)
        self._tell(f"rank {self.rank}: {what}{': ' + why if why else ''}")
        return self._end(
            WeightGroupFailed(
                what, where=f"rank {self.rank} of {self.world_size}, epoch {self.epoch}", why=why
            )
        )

    def abort(self, why: str) -> None:
        """End the link from any thread; waits in progress raise."""
        if self._cause is None:
            self.fail("aborted", why=why)

    def close(self) -> None:
        """Leave an idle link without a complaint."""
        self._end(WeightGroupFailed("the group is closed"), told=True)

    def _tell(self, message: str) -> None:
        store = self._store
        if store is None or self._cause is not None:
            return
        try:
            store.compare_set("failed", "", message)
        except RuntimeError:
            return  # the sender's store is gone: a member that still asks it finds out the same way

    def _end(self, cause: FlotillaError, *, told: bool = False) -> FlotillaError:
        """End the link and return the error to raise.

        Always a copy: the traceback of an error holds what its frames received, and the link may live on.
        """
        with self._lock:
            if self._cause is not None and not told:
                return copy(self._cause)
            self._cause = self._cause or cause
            groups, self._groups = self._groups, []
            pending, self._pending = [part for part in self._pending if not part.work.is_completed()], []
        for lane, group in groups:
            let_go(group, lane.carrier, [part.work for part in pending if part.group is group])
        return copy(self._cause)

    def _has(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda store: store.check(keys)))

    def _get(self, key: str) -> str:
        value: bytes = self._ask(lambda store: store.get(key))
        return value.decode()

    def _store_of(self, lane: Lane) -> PrefixStore:
        return PrefixStore(lane.key, self._required_store())

    def _required_store(self) -> PrefixStore:
        self.check()
        if self._store is None:
            raise self.fail("the link has no store")
        return self._store

    def _required_root(self) -> EpochStore:
        self._required_store()
        assert self._root is not None, "a store has its root"
        return self._root

    def _ask(self, question: Callable[[PrefixStore], Any]) -> Any:
        store = self._required_store()
        try:
            return question(store)
        except RuntimeError as error:
            raise self._end(WeightGroupFailed("the sender went away", why=_brief(error))) from error

    def _absent(self) -> str:
        absent = [str(rank) for rank in range(self.world_size) if not self._has([f"member/{rank}"])]
        return f"rank {', '.join(absent)} of {self.world_size}"


def _brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    return text[0].split(" This is typically")[0][-200:]
