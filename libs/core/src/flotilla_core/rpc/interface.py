"""The interface and the ports that a stack file gives to the services of a host.

Invariants: a service whose host lacks the interface of its stack file does not start; what it starts itself (ranks,
workers) learns both from its environment, because NCCL and gloo read theirs there as well. A variable that the user set
is kept.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import psutil

from flotilla_core import addresses
from flotilla_core.addresses import ports_of
from flotilla_core.errors import InvalidConfig

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

INTERFACE_VARIABLE = "FLOTILLA_INTERFACE"
PORTS_VARIABLE = "FLOTILLA_PORTS"


def check_interface(bind: BindConfig) -> str:
    """Return the address of `bind.interface`, empty where none is named; raise InvalidConfig for a wrong one."""
    if bind.interface is None:
        return ""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    if bind.interface not in addresses:
        raise _wrong(bind.interface, f"this host has {', '.join(sorted(addresses))}")
    if not states[bind.interface].isup:
        raise _wrong(bind.interface, "it is down")
    own = _addresses(bind.interface)
    if not own:
        raise _wrong(bind.interface, "it has no address")
    for key, host in (("host", bind.host), ("advertise_host", bind.advertise_host)):
        if host and _is_of_another_interface(host, bind.interface):
            raise _wrong(
                bind.interface, f"bind.{key} {host} is of another interface; this one has {', '.join(own)}"
            )
    return own[0]


def hand_down(bind: BindConfig) -> None:
    """Check the interface, and tell it and the ports to every process that this one starts."""
    if check_interface(bind) and bind.interface is not None:
        os.environ[INTERFACE_VARIABLE] = bind.interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", bind.interface)
        # Without the sign NCCL would take every interface that begins like this.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={bind.interface}")
    prefer_family_of(addresses.dialable(bind.advertise_host or bind.host))
    if bind.ports is not None:
        os.environ[PORTS_VARIABLE] = bind.ports


def prefer_family_of(host: str) -> None:
    """Let NCCL, which takes IPv4 where it can, use IPv6 where peers dial such an address; it refuses ::1."""
    if ":" in host and not addresses.is_loopback(host):
        os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6")


def interface_address() -> str:
    """Return the address of the interface that was handed down; empty where none was."""
    interface = os.environ.get(INTERFACE_VARIABLE, "")
    return next(iter(_addresses(interface)), "") if interface else ""


def listener(host: str, backlog: int = 512) -> socket.socket:
    """Return a socket that listens on `host`, on a free one of the ports that were handed down."""
    ports = ports_of(os.environ.get(PORTS_VARIABLE))
    for port in ports:
        try:
            return addresses.listening(host, port, backlog)
        except OSError:
            if port == ports[-1]:
                raise
    raise AssertionError("a range has a port")


def _addresses(interface: str) -> list[str]:
    """Return the addresses of an interface, those of IPv4 first; addresses of a link are of no use between hosts."""
    found = [
        one
        for one in psutil.net_if_addrs().get(interface, ())
        if one.family in (socket.AF_INET, socket.AF_INET6) and not one.address.startswith("fe80")
    ]
    return [one.address for one in sorted(found, key=lambda one: one.family != socket.AF_INET)]


def _is_of_another_interface(host: str, interface: str) -> bool:
    """Return whether `host` is an address of this machine that `interface` lacks; a name or a NAT says nothing."""
    return host not in _addresses(interface) and any(
        host in _addresses(other) for other in psutil.net_if_addrs()
    )


def _wrong(interface: str, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"the interface {interface} cannot be used",
        where="bind.interface",
        why=why,
        next_step="set bind.interface in the stack file of this host to the interface that leads to the other hosts: "
        "ip -brief address",
    )
