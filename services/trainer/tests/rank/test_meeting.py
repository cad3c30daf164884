"""Ranks of several hosts meet at a store of rank 0, and use the interface that leads there."""

from __future__ import annotations

import socket

import pytest

from flotilla_core.addresses import has_ipv6
from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.rank.meeting import Meeting, interface_of
from flotilla_weights.rendezvous import reach_store


def test_the_interface_of_an_address_is_found_also_where_it_lists_another_one() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.2") == loopback


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_ranks_meet_at_an_address_of_ipv6() -> None:
    assert interface_of("::1") == interface_of("127.0.0.1")
    meeting = Meeting()
    port, _, secret = meeting.open("::1").partition(":")
    store = reach_store("::1", int(port), 10, bytes.fromhex(secret), lambda: None)
    store.set("rank", "1")
    assert store.get("rank") == b"1"


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_another_host_has_no_interface(address: str) -> None:
    with pytest.raises(FailedPrecondition, match="no interface"):
        interface_of(address)


def test_a_store_is_opened_on_the_address_that_is_asked_for() -> None:
    port, _, secret = Meeting().open("127.0.0.2").partition(":")
    assert int(port) > 0 and len(bytes.fromhex(secret)) >= 16


def test_an_address_of_another_host_cannot_be_opened() -> None:
    with pytest.raises(FailedPrecondition, match=r"cannot meet rank 0 on 203\.0\.113\.7"):
        Meeting().open("203.0.113.7")
