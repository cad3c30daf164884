"""The interface and the ports of a host come from its stack file, and a wrong one is named."""

from __future__ import annotations

import os
import socket

import pytest
from pydantic import ValidationError

from flotilla_core import rpc
from flotilla_core.addresses import ports_of
from flotilla_core.config import BindConfig
from flotilla_core.errors import InvalidConfig, PortInUse
from flotilla_core.rpc.interface import (
    check_interface,
    hand_down,
    handed_credential,
    handed_ports,
    interface_address,
)
from flotilla_testing.credentials import ours


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("FLOTILLA_INTERFACE", "FLOTILLA_PORTS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in (*names, "FLOTILLA_SERVICE_CREDENTIAL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def free_pair() -> tuple[int, int]:
    """Return two neighbours of which both are free now."""
    for first in range(20_000, 30_000, 2):
        try:
            with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 1)):
                return first, first + 1
        except OSError:
            continue
    raise AssertionError("no two ports are free")


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidConfig, match=r"nothing0.*bind\.interface.*lo"):
        check_interface(BindConfig(interface="nothing0"))


def test_ranks_and_workers_learn_interface_ports_and_credential() -> None:
    hand_down(BindConfig(interface="lo", ports="9000-9001"), ours())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    given = handed_credential()
    assert handed_ports() == "9000-9001" and given is not None and given.path == ours().path
    assert interface_address() == "127.0.0.1"


def test_a_variable_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    hand_down(BindConfig(interface="lo"), ours())
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("text", ["9000", "9001-9000", "0-10", "9000-70000", "a-b", "-9000"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="no range of ports"):
        BindConfig(ports=text)


def test_without_a_range_any_port_is_taken() -> None:
    assert list(ports_of(None)) == [0] and list(ports_of("9000-9002")) == [9000, 9001, 9002]


async def test_services_take_free_ports_of_the_range_and_then_say_that_it_is_full() -> None:
    first, last = free_pair()
    bind = BindConfig(ports=f"{first}-{last}")
    servers = [rpc.RpcServer(bind, credential=ours()) for _ in range(3)]
    try:
        addresses = [await server.start() for server in servers[:2]]
        assert addresses == [f"127.0.0.1:{first}", f"127.0.0.1:{last}"]
        with pytest.raises(PortInUse, match=r"bind\.ports"):
            await servers[2].start()
    finally:
        for server in servers:
            await server.stop(0)
