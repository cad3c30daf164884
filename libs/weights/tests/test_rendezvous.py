"""Claims about who reaches the store of a weight group, and what its members see in it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch._C._distributed_c10d import PrefixStore

from flotilla.weights.v1.store_pb2 import AskRequest
from flotilla_core.addresses import has_ipv6
from flotilla_core.errors import FailedPrecondition
from flotilla_core.rpc.interface import CREDENTIAL_VARIABLE, PORTS_VARIABLE
from flotilla_core.trust import Credential
from flotilla_testing.credentials import expired, role_credential, stranger
from flotilla_weights.process_group import GLOO, connected_group
from flotilla_weights.rendezvous import new_secret, open_store, reach_store
from flotilla_weights.store import EpochStore, StoreError

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
    assert one.num_keys() == other.num_keys() == 2, "an error of one member costs no other"
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
    monkeypatch.setattr(EpochStore, "start", None)
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
            with pytest.raises(StoreError, match="does not prove that it is in this weight group"):
                reached(port, secret)
    assert own.num_keys() == 1 and own.get("weights") == b"ours"
    (line,) = [log for log in logs if log["event"] == "calls are refused"]
    assert line["peer"] == "ipv4:127.0.0.1" and line["method"] == "the store of a test"
    assert reached(port).get("weights") == b"ours"


SHOWN: dict[str, Callable[[Path], Credential]] = {
    "another stack": stranger,
    "nobody any more": expired,
    "who only runs": lambda folder: role_credential(folder, "run"),
}


@pytest.mark.parametrize("whose", SHOWN)
def test_the_secret_alone_opens_no_store(
    whose: str, opened: tuple[EpochStore, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, port = opened
    own.set("weights", "ours")
    monkeypatch.setenv(CREDENTIAL_VARIABLE, str(SHOWN[whose](tmp_path).path))
    with pytest.raises(StoreError):
        reached(port)
    assert own.num_keys() == 1


def test_a_store_of_another_stack_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CREDENTIAL_VARIABLE, str(stranger(tmp_path).path))
    store, port = open_store(HOST, LIMIT_S, SECRET, "the store of a test")
    store.set("a", "1")
    monkeypatch.undo()
    with pytest.raises(StoreError):
        reached(port)


STRANGERS = {
    "a web browser": b"GET / HTTP/1.1\r\n\r\n",
    "a TCPStore of torch": b"\x00\x3c\x85\xf7\x08\x00\x00\x00",
    "noise": os.urandom(4096),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_sent_away_at_once(opened: tuple[EpochStore, int], who: str) -> None:
    own, port = opened
    with socket.create_connection((HOST, port), LIMIT_S) as stranger, suppress(ConnectionError):
        stranger.sendall(STRANGERS[who])
        while stranger.recv(4096):
            continue
    assert own.num_keys() == 0 and reached(port).num_keys() == 0


def test_the_silent_and_those_who_wait_cost_no_thread(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    member = reached(port)
    before = set(threading.enumerate())
    silent = [socket.create_connection((HOST, port)) for _ in range(50)]
    waiting = [member.start(AskRequest(awaited=["late"], limit_s=LIMIT_S)) for _ in range(50)]
    reached(port).set("a", "1")
    assert set(threading.enumerate()) <= before
    own.set("late", "here")
    assert all(one.result(LIMIT_S).value == b"here" for one in waiting)
    for one in silent:
        one.close()


@pytest.mark.parametrize("host", ["nobody.invalid", "a..b", "x" * 70 + ".invalid", "no host at all"])
def test_a_host_that_cannot_be_found_is_an_error_at_once(host: str) -> None:
    with pytest.raises((StoreError, OSError)):
        reach_store(host, 1, LIMIT_S, SECRET, nothing)


def test_the_store_ends_with_its_owner_and_members_learn_of_it() -> None:
    store, port = open_store(HOST, LIMIT_S, SECRET, "the store of a test")
    member = reached(port)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(member.wait, ["never"])
        while not waiting.running():
            time.sleep(0.005)
        del store
        with pytest.raises(StoreError, match="the call failed"):
            waiting.result(LIMIT_S)
    with pytest.raises(StoreError, match="refused"):
        reached(port)


def test_a_store_listens_on_the_ports_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    host = "::1" if has_ipv6() else HOST
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(PORTS_VARIABLE, f"{port}-{port}")
        with pytest.raises(FailedPrecondition, match="cannot be opened"):
            open_store(host, LIMIT_S, SECRET, "the store of a test")
    store, found = open_store(host, LIMIT_S, SECRET, "the store of a test")
    store.set("a", "1")
    assert found == port and reach_store(host, port, LIMIT_S, SECRET, nothing).get("a") == b"1"


def test_many_members_form_a_group_of_gloo_by_few_questions(opened: tuple[EpochStore, int]) -> None:
    own, port = opened
    asked: list[AskRequest] = []

    def joined(rank: int) -> Any:
        store = own if rank == 0 else reached(port)
        start = store.start
        counted: Any = store
        counted.start = lambda question: asked.append(question) or start(question)
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
    assert len(asked) < MEMBERS * MEMBERS, sum(not question.change for question in asked)
