"""The addresses that identify a server, and the callers that are served without a proof.

Invariants: only a socket file, whose folder decides who may connect, is ever served without a token; an address that
another process of this host could have taken is no name of a server.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

import psutil

from flotilla_core.errors import InvalidConfig
from flotilla_core.trust import Token, check_is_secret, dialled

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

ANY_ADDRESS = ("0.0.0.0", "::", "[::]")
_UNIX = "unix:"


def require_token(bind: BindConfig, token: Token | None) -> None:
    """Raise InvalidConfig for an address that would be served without a token, or by one with a role."""
    if token is not None:
        check_is_secret(token.current(), f"bind.host {bind.host}")
    elif not bind.host.startswith(_UNIX):
        raise InvalidConfig(
            "the server has no token",
            where=f"bind.host {bind.host}",
            why="every user of this host could call it",
            next_step="start the stack (flotilla up), or name its token file in bind.token_file",
        )


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine alone."""
    if host.startswith(_UNIX):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def dialable(host: str) -> str:
    """Return `host`, or this machine's outward address where `host` stands for every address."""
    if host not in ANY_ADDRESS:
        return host
    # Connecting a datagram socket sends nothing: it only chooses the interface towards a reserved address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def joined(host: str, port: int) -> str:
    """Return host:port as peers dial it."""
    if host.startswith(_UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def own_names(bind: BindConfig, port: int) -> frozenset[str]:
    """Return every address by which callers may know a server that listens as `bind` says, on `port`."""
    hosts = [bind.host] if bind.host not in ANY_ADDRESS else _addresses_of_this_host()
    if bind.advertise_host:
        hosts.append(bind.advertise_host)
    return frozenset(dialled(joined(host, port)) for host in hosts)


def _addresses_of_this_host() -> list[str]:
    """Return its name and the addresses of its interfaces, which no other host and no other socket can have."""
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in families
    ]
    return [socket.gethostname(), *addresses]
