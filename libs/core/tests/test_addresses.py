"""Addresses of IPv6 are as good as those of IPv4: in stack files, in calls, in NATS and between ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flotilla_core import addresses
from flotilla_core.bus import Bus, NatsServer
from flotilla_core.rpc.interface import prefer_family_of
from flotilla_testing.credentials import ours
from flotilla_testing.servers import Checked, check, serving


def has_loopback_of_ipv6() -> bool:
    try:
        return addresses.is_free("::1", 0)
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_loopback_of_ipv6(), reason="this host has no ::1")


@pytest.mark.parametrize("written", ["::1", "[::1]", "0:0:0:0:0:0:0:1", "[0000::1]"])
async def test_a_service_on_ipv6_is_called_by_whatever_spelling(written: str) -> None:
    async with serving(Checked(), host=written) as address:
        assert address.startswith("[::1]:")
        port = address.rpartition(":")[2]
        for dialled in (address, f"[0:0:0:0:0:0:0:1]:{port}"):
            await check(dialled, ours())


async def test_nats_listens_on_ipv6_and_says_so(tmp_path: Path) -> None:
    for host, dialled in (("::1", ""), ("0.0.0.0", "::1")):
        server = await NatsServer.start(tmp_path, host=host, dialled=dialled, credential=ours())
        try:
            assert server.url.startswith("tls://[::1]:")
            bus = await Bus.connect(server.url, server.login)
            await bus.close()
        finally:
            await server.stop()


def test_our_address_is_of_the_family_of_the_peer() -> None:
    assert addresses.towards("::1") == "::1"
    assert addresses.towards("127.0.0.1") == "127.0.0.1"


def test_loopback_addresses_are_known_by_every_spelling() -> None:
    for host in ("::1", "[::1]", "0:0:0:0:0:0:0:1", "127.0.0.1", "127.1.2.3", "localhost", "unix:/a:b/c"):
        assert addresses.is_loopback(host), host
    for host in ("fd00::2", "[fd00::2]", "10.0.0.1", "host", "::"):
        assert not addresses.is_loopback(host), host
    assert addresses.host_of("[FD00::0:2]:80") == "fd00::2"


def test_nccl_takes_ipv6_where_peers_dial_it_and_not_for_a_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_FAMILY", "")
    monkeypatch.delenv("NCCL_SOCKET_FAMILY")
    for host in ("::1", "10.0.0.1", "host"):
        prefer_family_of(host)
        assert "NCCL_SOCKET_FAMILY" not in os.environ
    prefer_family_of("fd00::2")
    assert os.environ["NCCL_SOCKET_FAMILY"] == "AF_INET6"
