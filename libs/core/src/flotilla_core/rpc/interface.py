"""The interface, the ports and the credential that a stack gives to the processes of a host.

Invariants: a service whose host lacks the interface of its stack file does not start; what it starts itself (ranks,
workers) learns all three from its environment, because NCCL and gloo read theirs there as well. A variable that the
user set is kept.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from flotilla_core import addresses
from flotilla_core.errors import InvalidConfig
from flotilla_core.trust import Credential

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

INTERFACE_VARIABLE = "FLOTILLA_INTERFACE"
PORTS_VARIABLE = "FLOTILLA_PORTS"
CREDENTIAL_VARIABLE = "FLOTILLA_SERVICE_CREDENTIAL"


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


def hand_down(bind: BindConfig, credential: Credential) -> None:
    """Check the interface, and tell it, the ports and the credential to every process that this one starts."""
    if check_interface(bind) and bind.interface is not None:
        os.environ[INTERFACE_VARIABLE] = bind.interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", bind.interface)
        # Without the sign NCCL would take every interface that begins like this.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={bind.interface}")
    prefer_family_of(addresses.dialable(bind.advertise_host or bind.host))
    if bind.ports is not None:
        os.environ[PORTS_VARIABLE] = bind.ports
    os.environ[CREDENTIAL_VARIABLE] = str(credential.path)


def prefer_family_of(host: str) -> None:
    """Let NCCL, which takes IPv4 where it can, use IPv6 where peers dial such an address; it refuses ::1."""
    if ":" in host and not addresses.is_loopback(host):
        os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6")


def interface_address() -> str:
    """Return the address of the interface that was handed down; empty where none was."""
    interface = os.environ.get(INTERFACE_VARIABLE, "")
    return next(iter(_addresses(interface)), "") if interface else ""


def handed_ports() -> str | None:
    """Return the range of ports that was handed down, if any was."""
    return os.environ.get(PORTS_VARIABLE)


def handed_credential() -> Credential | None:
    """Return the credential that was handed down, if any was."""
    path = os.environ.get(CREDENTIAL_VARIABLE)
    return Credential(Path(path)) if path else None


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
