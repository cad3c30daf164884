"""Ranks of several hosts meet at a store of rank 0, and use the interface that leads there."""

from __future__ import annotations

import socket

import pytest

from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.rank.meeting import Meeting, interface_of


def test_the_interface_of_an_address_is_found_also_where_it_lists_another_one() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.2") == loopback


def test_an_address_of_another_host_has_no_interface() -> None:
    with pytest.raises(FailedPrecondition, match="no interface"):
        interface_of("203.0.113.7")


def test_a_store_is_opened_on_the_address_that_is_asked_for() -> None:
    port, _, secret = Meeting().open("127.0.0.2").partition(":")
    assert int(port) > 0 and len(bytes.fromhex(secret)) >= 16


def test_an_address_of_another_host_cannot_be_opened() -> None:
    with pytest.raises(FailedPrecondition, match=r"cannot meet rank 0 on 203\.0\.113\.7"):
        Meeting().open("203.0.113.7")
