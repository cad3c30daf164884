"""The transport under `Sender` and `Receiver`: one process group of one epoch, and its store.

Invariants: every wait has a deadline of `timeout_s`, watches for a failure that any member reported, and ends within
50 ms once this end is aborted; after the first failure the link stays dead (a new epoch makes a new one), and
what a broken transfer had received is freed with the error that it raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

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
    carrier_between,
    connected_group,
    let_go,
    pause_over,
)
from flotilla_weights.rendezvous import open_store, reach_store
from flotilla_weights.same_gpu import Buckets, SameGpuGroup, counters, gpu_of, mapped_buckets, own_buckets

STORE_POLL_S = 0.001
LONGEST_STORE_POLL_S = 0.02
STORE_CHECK_EVERY_S = 0.25


class Link:
    """One member's end of the group."""

    def __init__(self, epoch: int, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
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
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self._server: TCPStore | None = None
        self._store: PrefixStore | None = None
        self._group: Any = None
        self._pending: list[Any] = []
        self._cause: FlotillaError | None = None
        self._lock = threading.Lock()
        self._next_check = 0.0

    def serve(self, host: str) -> int:
        """Open the rendezvous store on a free port of `host`."""
        self._server, port = open_store(host, self.timeout_s)
        self._store = PrefixStore(f"flotilla/{self.epoch}", self._server)
        return port

    def dial(self, host: str, port: int) -> None:
        """Reach the sender's store, which is open before its address is published."""
        try:
            client = reach_store(host, port, self.timeout_s, self.check)
        except (OSError, RuntimeError, UnicodeError) as error:
            # Nothing of the group's yet: a member that does not reach the sender is the one that fails.
            raise self._end(
                Unavailable(f"the sender's store at {host}:{port} does not answer", why=_brief(error))
            ) from error
        self._store = PrefixStore(f"flotilla/{self.epoch}", client)

    def form(self, peer_host: str, credential: str, device: torch.device) -> None:
        """Meet all members, check that they hold the same `credential`, choose the carrier, connect the group."""
        if self.backend == NCCL:
            self.put(f"gpu/{self.rank}", gpu_of(device))
        self.put(f"member/{self.rank}", credential)
        keys = [f"member/{rank}" for rank in range(self.world_size)]
        self.wait(lambda: self._has(keys), lambda: f"waiting for {self._absent()} to join", self._poll_store)
        for rank in range(self.world_size):
            if self._get(f"member/{rank}") != credential:
                raise self.fail(
                    f"rank {rank} joined with another manifest", why="names, types, shapes or order differ"
                )
        if self.backend == NCCL:
            gpus = [self._get(f"gpu/{rank}") for rank in range(self.world_size)]
            self.backend = carrier_between(self.backend, gpus)
        try:
            if self.backend == CUDA_IPC:
                self._share_buckets(device)
            else:
                self._group = connected_group(
                    self.backend,
                    PrefixStore(self.backend, self._required_store()),
                    self.rank,
                    self.world_size,
                    peer_host=peer_host,
                    device=device,
                    timeout_s=self.timeout_s,
                )
        except (RuntimeError, OSError) as error:
            advice = "; weights.backend: gloo does without CUDA IPC" if self.backend == CUDA_IPC else ""
            raise self.fail("the group could not be connected", why=_brief(error) + advice) from error

    def _share_buckets(self, device: torch.device) -> None:
        """Map the sender's buckets at every receiver; they meet again when all of them see the memory."""
        buckets: Buckets
        if self.rank == SENDER_RANK:
            buckets, description = own_buckets(device)
            self.put("buckets", description)
        else:
            buckets = mapped_buckets(self.wait_for_key("buckets", "waiting for the sender's buckets"), device)
        store = PrefixStore(CUDA_IPC, self._required_store())
        self._group = group = SameGpuGroup(store, self.rank, self.world_size, buckets)
        if self._cause is not None:
            # Another thread ended the link in between and could not know of this group.
            group.close()
        keys = [f"{CUDA_IPC}/{key}" for key in counters(self.world_size)]
        self.wait(
            lambda: self._has(keys), lambda: "waiting for every member to map the buckets", self._poll_store
        )

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start moving one buffer from the sender; `finish` it."""
        self.check()
        if self.rank == SENDER_RANK and time.monotonic() >= self._next_check:
            self.check_peers()
        group = self._group
        if group is None:
            raise self.fail("the group is not connected")
        options = BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.rootTensor = 0
        try:
            work = group.broadcast([tensor], options)
        except RuntimeError as error:
            raise self.fail("a transfer could not be started", why=_brief(error)) from error
        with self._lock:
            self._pending.append(work)
        if self._cause is not None:
            # Another thread ended the link in between and could not know of this transfer.
            let_go(group, self.backend, [work])
            self.check()
        return work

    def finish(self, work: Any, what: str) -> None:
        """Wait for one transfer."""
        self.wait(work.is_completed, lambda: what, pause_over(work, self.backend))
        self.check()  # completed or not, an aborted epoch delivers nothing more
        with self._lock:
            self._pending = [other for other in self._pending if other is not work]
        try:
            work.wait()
        except RuntimeError as error:
            self.check_peers()  # a member that leaves says why before its connections close
            raise self.fail(f"{what} failed", why=_brief(error)) from error

    def put(self, key: str, value: str) -> None:
        """Tell all members something."""
        self._ask(lambda store: store.set(key, value))

    def wait_for_key(self, key: str, what: str) -> str:
        """Wait until the sender has told something, and return it."""
        self.wait(lambda: self._has([key]), lambda: what, self._poll_store)
        return self._get(key)

    def wait(self, done: Callable[[], bool], what: Callable[[], str], pause: Callable[[int], None]) -> None:
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
            group, self._group = self._group, None
            pending, self._pending = [w for w in self._pending if not w.is_completed()], []
        if group is not None:
            let_go(group, self.backend, pending)
        return copy(self._cause)

    def _has(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda store: store.check(keys)))

    def _get(self, key: str) -> str:
        value: bytes = self._ask(lambda store: store.get(key))
        return value.decode()

    def _required_store(self) -> PrefixStore:
        self.check()
        if self._store is None:
            raise self.fail("the link has no store")
        return self._store

    def _ask(self, question: Callable[[PrefixStore], Any]) -> Any:
        store = self._required_store()
        try:
            return question(store)
        except RuntimeError as error:
            raise self._end(WeightGroupFailed("the sender went away", why=_brief(error))) from error

    def _poll_store(self, looks: int) -> None:
        """Sleep between two questions; many members ask less often, because one store answers all of them."""
        longest = min(STORE_POLL_S * 2 * self.world_size, LONGEST_STORE_POLL_S)
        time.sleep(min(STORE_POLL_S * (1 + looks), longest))

    def _absent(self) -> str:
        absent = [str(rank) for rank in range(self.world_size) if not self._has([f"member/{rank}"])]
        return f"rank {', '.join(absent)} of {self.world_size}"


def _brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    return text[0].split(" This is typically")[0][-200:]
