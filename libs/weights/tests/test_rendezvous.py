"""Claims about who reaches the store of a weight group, and what its members see in it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import structlog
import torch
from torch._C._distributed_c10d import PrefixStore

from flotilla_weights import rendezvous
from flotilla_weights.process_group import GLOO, connected_group
from flotilla_weights.rendezvous import new_secret, open_store, reach_store
from flotilla_weights.store import EpochStore, Question, StoreError, Verb

HOST = "127.0.0.1"
LIMIT_S = 10.0
SECRET = b"of this epoch"
MEMBERS = 24


def nothing() -> None:
    """No reason to stop waiting."""


@pytest.fixture
def opened() -> Iterator[tuple[EpochStore, int]]:
    yield open_store(HOST, LIMIT_S, SECRET, "the store of a test")


def reached(port: int, secret: bytes = SECRET, limit_s: float = LIMIT_S) -> EpochStore:
    return reach_store(HOST, port, limit_s, secret, nothing)


def until(what: str, holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


def hung_up(connection: socket.socket) -> bool:
    """Whether the server ends a connection, however it does."""
    connection.settimeout(LIMIT_S)
    try:
        while connection.recv(4096):
            continue
    except ConnectionError:
        return True
    return True


def test_a_member_finds_what_others_set_counted_swapped_and_removed(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    one, other = reached(port), reached(port)
    one.set("a", "1")
    assert [store.get("a") for store in (own, one, other)] == [b"1"] * 3
    assert one.add("n", 2) == 2 and other.add("n", 3) == 5 and own.add("n", 0) == 5
    assert [store.get("n") for store in (own, one, other)] == [b"5"] * 3
    assert other.compare_set("failed", "", "rank 2") == b"rank 2"
    assert one.compare_set("failed", "", "rank 1") == b"rank 2"
    assert one.compare_set("never", "held", "new") == b"held" and not own.check(["never"])
    assert own.num_keys() == 3 and own.check(["a", "n", "failed"]) and not own.check(["a", "b"])
    assert one.delete_key("a") and not one.delete_key("a")
    # Others learn of it with their next answer.
    assert other.num_keys() == 2 and not other.check(["a", "n"]) and not one.check(["a"])
    with pytest.raises(StoreError, match="either set or counted"):
        one.add("failed", 1)
    assert one.clone() is one


def test_a_wait_ends_with_the_key_and_otherwise_at_its_limit(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    member = reached(port)
    with pytest.raises(StoreError, match=r"no later in the store within 0\.2 s"):
        member.wait(["later"], timedelta(seconds=0.2))
    for store, other, key in ((member, own, "x"), (own, member, "y")):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, key)
            other.set(key, "here")
            assert waiting.result(LIMIT_S) == b"here"


def test_what_is_known_is_not_asked_for_again(opened: tuple[EpochStore, int], monkeypatch: Any) -> None:
    own, port = opened
    member = reached(port)
    for number in range(100):
        own.set(f"key/{number}", str(number))
    member.wait(["key/99"])
    monkeypatch.setattr(member, "desk", type("Copy", (), {"values": member.desk.values}))
    assert [member.get(f"key/{number}") for number in range(100)] == [b"%d" % n for n in range(100)]
    assert member.check([f"key/{number}" for number in range(100)])


def test_a_message_of_any_size_arrives_whole(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    large = os.urandom(20 << 20)
    one, other = reached(port), reached(port)
    one.set("large", large)
    other.set("behind", "it")
    assert other.get("large") == large and own.get("large") == large and one.get("behind") == b"it"


def test_another_secret_is_refused_and_no_key_is_read_or_written(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    own.set("weights", "ours")
    with structlog.testing.capture_logs() as logs:
        for secret in (b"", b"of another epoch", new_secret()):
            with pytest.raises(StoreError, match="does not take us"):
                reached(port, secret)
    assert own.num_keys() == 1 and own.get("weights") == b"ours"
    (line,) = [log for log in logs if log["event"] == "calls are refused"]
    assert line["peer"] == "ipv4:127.0.0.1" and line["method"] == "the store of a test"
    assert reached(port).get("weights") == b"ours"


STRANGERS = {
    "a web browser": b"GET / HTTP/1.1\r\n\r\n",
    "a TCPStore of torch": b"\x00\x3c\x85\xf7\x08\x00\x00\x00",
    "a greeting without a proof": rendezvous.GREETING + bytes(16) + (16).to_bytes(4, "big") + bytes(16),
    "a frame without end": rendezvous.GREETING + bytes(16) + b"\xff\xff\xff\xff" + bytes(64),
    "noise": os.urandom(4096),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_sent_away_at_once(opened: tuple[EpochStore, int], who: str) -> None:
    own, port = opened
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(STRANGERS[who])
        began = time.monotonic()
        assert hung_up(stranger)
        assert time.monotonic() - began < rendezvous.PROOF_S / 2
    assert own.num_keys() == 0 and reached(port).num_keys() == 0


def test_the_silent_cost_no_thread_and_are_sent_away_in_time(
    opened: tuple[EpochStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = opened
    reached(port)
    monkeypatch.setattr(rendezvous, "PROOF_S", 0.3)
    before = set(threading.enumerate())
    silent = [socket.create_connection((HOST, port)) for _ in range(50)]
    slow = socket.create_connection((HOST, port))
    slow.sendall(rendezvous.GREETING)
    member = reached(port)
    member.set("a", "1")
    # The member's own thread ends when it has dialled, a little before or after this line.
    assert {one.name for one in set(threading.enumerate()) - before} <= {"weights-dial"}
    assert all(hung_up(one) for one in (*silent, slow))
    assert member.get("a") == b"1"
    for one in (*silent, slow):
        one.close()


def test_more_strangers_than_fit_cost_the_oldest_and_no_member(
    opened: tuple[EpochStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = opened
    monkeypatch.setattr(rendezvous, "MOST_UNPROVEN", 10)
    member = reached(port)
    silent = [socket.create_connection((HOST, port)) for _ in range(40)]
    assert all(hung_up(one) for one in silent[:30])
    member.set("a", "1")
    assert reached(port).get("a") == b"1"
    for one in silent:
        one.close()


def carried(target: int, spoil: threading.Event) -> tuple[int, list[bytes]]:
    """Return a port from which one connection is carried to `target`, and what the member says, as it was sent.

    Once `spoil` is set, something else arrives.
    """
    said: list[bytes] = []
    listener = socket.create_server((HOST, 0))

    def pump(source: socket.socket, sink: socket.socket, keep: list[bytes]) -> None:
        try:
            while part := source.recv(1 << 16):
                keep.append(part)
                sink.sendall(part[:-1] + bytes([part[-1] ^ spoil.is_set()]))
        except OSError:
            pass

    def carry() -> None:
        with listener, listener.accept()[0] as near, socket.create_connection((HOST, target)) as far:
            back = threading.Thread(target=pump, args=(far, near, []), daemon=True)
            back.start()
            pump(near, far, said)

    threading.Thread(target=carry, daemon=True).start()
    return listener.getsockname()[1], said


def test_what_was_heard_on_the_way_opens_nothing_and_holds_no_key(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    between, said = carried(port, threading.Event())
    member = reached(between)
    member.set("address", "10.1.2.3")
    heard = b"".join(said)
    assert b"address" not in heard and b"10.1.2.3" not in heard
    own.delete_key("address")
    with socket.create_connection((HOST, port)) as again:
        again.sendall(heard)
        assert hung_up(again)
    assert own.num_keys() == 0


def test_a_store_with_another_secret_is_not_believed() -> None:
    store, port = open_store(HOST, LIMIT_S, b"of a liar", "the store of a test")
    store.set("a", "1")
    with pytest.raises(StoreError, match="not the store of this epoch"):
        reached(port)


def test_the_store_ends_with_its_owner_and_members_learn_of_it() -> None:
    others = set(threading.enumerate())
    store, port = open_store(HOST, LIMIT_S, SECRET, "the store of a test")
    member = reached(port)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(member.wait, ["never"])
        del store
        with pytest.raises(StoreError, match="does not answer"):
            waiting.result(LIMIT_S)
    until("the end of its thread", lambda: set(threading.enumerate()) <= others)
    with pytest.raises(OSError, match="refused"):
        reached(port)


def test_an_error_of_one_member_costs_no_other(opened: tuple[EpochStore, int]) -> None:
    _, port = opened
    spoil = threading.Event()
    one, other = reached(carried(port, spoil)[0]), reached(port)
    spoil.set()
    with pytest.raises(StoreError):
        one.num_keys()
    other.set("a", "1")
    assert other.num_keys() == 1


def test_many_members_form_a_group_of_gloo_by_few_questions(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    asked: list[Question] = []

    def joined(rank: int) -> Any:
        store = own if rank == 0 else reached(port)
        desk: Any = store.desk
        ask = desk.ask
        desk.ask = lambda question: asked.append(question) or ask(question)
        lane = PrefixStore("lane", store)
        return connected_group(
            GLOO, lane, rank, MEMBERS, peer_host=HOST, device=torch.device("cpu"), timeout_s=60.0
        ), store

    with ThreadPoolExecutor(MEMBERS) as pool:
        groups = list(pool.map(joined, range(MEMBERS)))
        tensors = [torch.full((3,), float(rank)) for rank in range(MEMBERS)]
        works = [group.allreduce([tensor]) for (group, _), tensor in zip(groups, tensors, strict=True)]
        for work in works:
            work.wait()
    assert all(tensor.tolist() == [sum(range(MEMBERS))] * 3 for tensor in tensors)
    # Each member hears of all others; asking for each by each would be more than twice the square.
    assert len(asked) < MEMBERS * MEMBERS, sum(question.verb is Verb.WAIT for question in asked)
