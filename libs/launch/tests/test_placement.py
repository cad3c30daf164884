"""A port is looked for where a process can listen; a host that is none of ours is named at once."""

from __future__ import annotations

import socket

import pytest

from flotilla_core.errors import InvalidConfig
from flotilla_launch.placement import reserve_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::"])
def test_a_port_is_reserved_on_hosts_of_either_family(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    assert reserve_port(host) > 0


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77", "no-such-host.invalid"])
def test_a_host_that_is_none_of_ours_is_named(host: str) -> None:
    with pytest.raises(InvalidConfig, match=r"bind\.host"):
        reserve_port(host)
