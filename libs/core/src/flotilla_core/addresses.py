"""Addresses of hosts, of IPv4 and of IPv6 alike.

Invariants: a host is written without brackets, and an IPv6 address in one way alone; brackets come where a port follows
(`joined`). Where a name or a wildcard leaves the choice,
every process makes the same one: IPv4 first, unless the wildcard is that of IPv6. `localhost` and the loopback of a
host without IPv4 are ::1.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

ANY_ADDRESS = ("0.0.0.0", "::")
UNIX = "unix:"
_LOOPBACKS = ("127.0.0.1", "::1")
# Of ranges that are reserved for documentation: nobody has them, and the way to them is the way out.
_OUTWARD = {socket.AF_INET: "203.0.113.1", socket.AF_INET6: "2001:db8::1"}
_DISCARD = 9


@cache
def loopback() -> str:
    """Return the address by which this host reaches itself: that of IPv4, where it has one."""
    for address in _LOOPBACKS:
        with suppress(OSError):
            if is_free(address, 0):
                return address
    return _LOOPBACKS[0]


def canonical(host: str) -> str:
    """Return `host` without brackets, and an IPv6 address in its shortest form; a name or a path stays as it is."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return ipaddress.IPv6Address(bare).compressed
    except ValueError:
        return bare


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine alone."""
    if host.startswith(UNIX):
        return True
    try:
        return ipaddress.ip_address(canonical(host)).is_loopback
    except ValueError:
        return host == "localhost"


def joined(host: str, port: int) -> str:
    """Return host:port as peers dial it."""
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of host:port."""
    return canonical(address.rpartition(":")[0])


@cache
def has_ipv6() -> bool:
    """Return whether this host speaks IPv6 at all."""
    with suppress(OSError):
        return is_free(ANY_ADDRESS[1], 0)
    return False


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens there; raise OSError where none can."""
    family, address = _resolved(host, port)
    return socket.create_server(address, family=family, backlog=backlog)


def is_free(host: str, port: int) -> bool:
    """Return whether a process of this host could listen there; raise OSError for a host that is none of ours."""
    family, address = _resolved(host, port)
    with socket.socket(family) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def towards(host: str) -> str:
    """Return our address on the interface that leads to `host`; raise OSError where none does."""
    # Connecting a datagram socket sends nothing: it only chooses the interface.
    family, address = _resolved(host, _DISCARD)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def dialable(host: str) -> str:
    """Return `host`, or this machine's outward address where `host` stands for every address."""
    if host not in ANY_ADDRESS:
        return host
    families = list(_OUTWARD) if host == ANY_ADDRESS[0] else list(reversed(_OUTWARD))
    for family in families:
        with suppress(OSError):
            return towards(_OUTWARD[family])
    return socket.gethostname()


def ports_of(text: str | None) -> Sequence[int]:
    """Return the ports of a range such as 9000-9099; without one, 0 alone, which stands for any free port."""
    if not text:
        return (0,)
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address  # type: ignore[return-value]  # of IPv6 it has two more fields, which every call takes
