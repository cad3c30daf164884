"""The process group of one epoch: which carrier it has, how it is connected, waited for and let go.

Invariants: all members choose the same carrier, because all choose from the same facts; a group with work in flight is
never destroyed under that work: gloo cannot cancel, so the remains are left to a thread that waits for them to end.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

log = logging.getLogger(__name__)

SENDER_RANK = 0
GLOO, NCCL, CUDA_IPC = "gloo", "nccl", "cuda_ipc"
SPINS = 200
POLL_S = 0.0005
GLOO_SLICE = timedelta(seconds=0.05)
"""How long an abort of this end may go unseen by a thread that waits for a transfer."""


def carrier_between(backend: str, gpus: list[str]) -> str:
    """Return what moves the bytes of a group whose members sit on these GPUs: nccl takes one member a GPU."""
    if backend != NCCL or len(set(gpus)) == len(gpus):
        return backend
    if len(set(gpus)) == 1:
        return CUDA_IPC
    log.warning(
        "some members of the weight group share a GPU and others do not: weights go through the memory of the "
        "hosts, which is slow; give each generator GPUs of its own, or put all of them on the trainer's"
    )
    return GLOO


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
        options._devices = [_gloo_device(_address_towards(peer_host))]
        return gloo(store, rank, world_size, options)
    from torch._C._distributed_c10d import ProcessGroupNCCL

    # Deadlines are kept by the waiting caller; a watchdog would end the process.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.cuda.set_device(device)
    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timeout
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


def _address_towards(host: str) -> str:
    """Our address on the interface that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return address
