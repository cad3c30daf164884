"""Lets the ranks of a gang meet: by a file where they share a host, else by a store of rank 0 on the network.

Invariants: the store takes only ranks that prove its secret, which rank 0 makes and the front passes on; gloo and NCCL
of ranks on several hosts use the interface that leads to rank 0, unless the user names one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

import psutil
import torch.distributed as dist

from flotilla_core.addresses import joined
from flotilla_core.errors import FailedPrecondition, FlotillaError
from flotilla_core.rpc.interface import prefer_family_of
from flotilla_trainer.wire.settings import RankSetup
from flotilla_weights.process_group import address_towards
from flotilla_weights.rendezvous import new_secret, open_store, reach_store

MEET_WITHIN_S = 300.0
"""The longest wait for the other ranks; the front gives a gang up that makes no progress."""


class Meeting:
    """The meeting of one gang, as one of its ranks sees it."""

    def __init__(self) -> None:
        self._kept: Any = None
        """The store: torch keeps only its C++ half, which asks this one."""

    def open(self, host: str) -> str:
        """Open the store, on this address of rank 0; return its port and its secret, for the other ranks."""
        secret = new_secret()
        try:
            self._kept, port = open_store(host, MEET_WITHIN_S, secret, "the store of the ranks")
        except FlotillaError as error:
            raise FailedPrecondition(
                f"ranks of other hosts cannot meet rank 0 on {host}",
                why=error.why,
                next_step="set bind.host of the trainer to an address of its host, or to 0.0.0.0",
            ) from error
        return f"{port}:{secret.hex()}"

    def join(self, setup: RankSetup) -> None:
        """Form the process group of the gang; a collective."""
        if setup.meet_host:
            use_interface_towards(setup.meet_host)
        self._kept = self._store(setup)
        dist.init_process_group(setup.backend, store=self._kept, rank=setup.rank, world_size=setup.nproc)

    def _store(self, setup: RankSetup) -> Any:
        if not setup.meet_host:
            return dist.FileStore(setup.rendezvous, setup.nproc)  # type: ignore[attr-defined]  # its documented place
        if self._kept is not None:
            return self._kept
        port, _, secret = setup.rendezvous.partition(":")
        try:
            return reach_store(setup.meet_host, int(port), MEET_WITHIN_S, bytes.fromhex(secret), lambda: None)
        except (OSError, RuntimeError, UnicodeError) as error:
            raise FailedPrecondition(
                "this rank does not reach rank 0",
                where=joined(setup.meet_host, int(port)),
                why=str(error),
                next_step="let the hosts of a gang reach each other on all ports; bind.host of the trainer, or its "
                "bind.advertise_host, is what they dial",
            ) from error


def use_interface_towards(host: str) -> None:
    """Let the collectives of this process use the interface that leads to `host`."""
    name = interface_of(address_towards(host))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    # Without the sign it would be the beginning of a name.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    prefer_family_of(host)


def interface_of(address: str) -> str:
    """Return the name of the interface of this host that has an address."""
    wanted = ipaddress.ip_address(address)
    around = ""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(one.address.partition("%")[0])
            if own == wanted:
                return name
            # All of 127.0.0.0/8 is of the loopback, which lists one address alone.
            if own.version == wanted.version == 4 and one.netmask:
                around = (
                    name if wanted in ipaddress.ip_network(f"{own}/{one.netmask}", strict=False) else around
                )
    if not around:
        raise FailedPrecondition(
            f"no interface of this host has the address {address}",
            next_step="name the interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the gang's environment",
        )
    return around
