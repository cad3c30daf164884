"""The lanes of one epoch: who sends to whom, by which carrier, and how their groups are connected and let go.

Invariants: all members see the same lanes, because all derive them from the same facts; a receiver hears exactly one
sender; a group with work in flight is never destroyed under that work: gloo cannot cancel, so the remains are left to a
thread that waits for them to end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from flotilla_core import addresses
from flotilla_core.rpc.interface import interface_address

log = logging.getLogger(__name__)

SENDER_RANK = 0
GLOO, NCCL, CUDA_IPC = "gloo", "nccl", "cuda_ipc"
SPINS = 200
POLL_S = 0.0002
GLOO_SLICE = timedelta(seconds=0.05)
"""The longest time for which a thread that waits for a transfer may miss an abort of this end."""


@dataclass(frozen=True)
class Lane:
    """A sender and the receivers that hear it."""

    carrier: str
    sender: int
    receivers: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return its members, the sender first."""
        return (self.sender, *self.receivers)

    @property
    def key(self) -> str:
        """Return a name of its own in the store of the group."""
        return f"{self.carrier}/{self.sender}"


def lanes_between(
    backend: str, world_size: int, senders: Sequence[int], gpus: Sequence[str]
) -> tuple[Lane, ...]:
    """Return the lanes of a group whose members sit on these GPUs; gloo asks for none.

    A receiver hears the sender on its own GPU through that GPU's memory. The others hear the first sender by nccl,
    which takes one member a GPU, and where they share one, by gloo.
    """
    first = senders[0]
    receivers = [rank for rank in range(world_size) if rank not in senders]
    if backend != NCCL:
        return (Lane(backend, first, tuple(receivers)),)
    owners: dict[str, int] = {}
    for sender in senders:
        owners.setdefault(gpus[sender], sender)
    far = [rank for rank in receivers if gpus[rank] not in owners]
    near = [rank for rank in receivers if gpus[rank] in owners]
    carrier = NCCL
    if len({gpus[rank] for rank in far}) < len(far):
        carrier = GLOO
        log.warning(
            "generators share a GPU on which no rank of the trainer is: weights go there through the memory of the "
            "hosts, which is slow; give each generator GPUs of its own, or put them on the GPUs of the trainer"
        )
        # What the first sender packs lies in host memory then, for all that hear it.
        far += [rank for rank in near if owners[gpus[rank]] == first]
        near = [rank for rank in near if owners[gpus[rank]] != first]
    by_sender = {
        sender: tuple(rank for rank in near if owners[gpus[rank]] == sender) for sender in owners.values()
    }
    lanes = [Lane(CUDA_IPC, sender, heard_by) for sender, heard_by in by_sender.items() if heard_by]
    return (*lanes, Lane(carrier, first, tuple(sorted(far)))) if far else tuple(lanes)


def connected_group(
    backend: str,
    store: PrefixStore,
    rank: int,
    world_size: int,
    *,
    peer_host: str,
    device: torch.device,
    timeout_s: float,
) -> Any:
    """Meet all members in `store`; gloo listens on the interface that leads to `peer_host`."""
    timeout = timedelta(seconds=timeout_s)
    if backend == GLOO:
        gloo: Any = ProcessGroupGloo  # its stub does not list what follows
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [_gloo_device(address_towards(peer_host))]
        return gloo(store, rank, world_size, options)
    from torch._C._distributed_c10d import ProcessGroupNCCL

    # Deadlines are kept by the waiting caller; a watchdog would end the process.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.cuda.set_device(device)
    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    nccl.is_high_priority_stream = True  # a transfer takes few of a GPU's processors, but wants them at once
    return ProcessGroupNCCL(store, rank, world_size, nccl)


def pause_over(work: Any, backend: str) -> Callable[[int], None]:
    """Return what to call between two polls of a transfer, with the number of earlier polls."""
    if backend == CUDA_IPC:
        return lambda looks: None if work.advance() else _poll(looks)
    return _doze_over(work) if backend == GLOO else _poll


def let_go(group: Any, backend: str, pending: list[Any]) -> None:
    """Leave a group, never under a transfer that still runs in it."""
    if backend == NCCL:
        group.abort()
    elif backend == CUDA_IPC:
        group.close()
    elif pending:
        threading.Thread(target=_outlive, args=(group, pending), name="weights-remains", daemon=True).start()


def _poll(looks: int) -> None:
    time.sleep(0 if looks < SPINS else POLL_S)


def _doze_over(work: Any) -> Callable[[int], None]:
    """Sleep until a transfer of gloo has ended, for a slice at most.

    Where many members share a machine, polls by all of them would slow the very transfer that they wait for.
    """

    def doze(_: int) -> None:
        try:
            work.wait(GLOO_SLICE)
        except RuntimeError:
            return  # not yet, or it failed: the waiting caller finds out which

    return doze


@cache
def _gloo_device(address: str) -> Any:
    """One for all groups of this process: each has a thread, which looks for work a hundred times a second."""
    gloo: Any = ProcessGroupGloo  # as above
    return gloo.create_device(hostname=address)


def _outlive(group: Any, pending: list[Any]) -> None:
    """Hold a broken gloo group until its last transfer has ended by itself."""
    for work in pending:
        try:
            work.wait()
        except RuntimeError:
            continue  # how a transfer without a peer ends
    del group


def address_towards(host: str) -> str:
    """Our address on the interface of the stack file, else on the one that leads to `host`."""
    return interface_address() or addresses.towards(host)
