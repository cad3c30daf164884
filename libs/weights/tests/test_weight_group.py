"""Claims about moving weights from one sender to many receivers."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import (
    FailedPrecondition,
    InvalidRequest,
    Unavailable,
    WeightGroupFailed,
    WeightsMismatch,
)
from flotilla_weights import group
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Receiver, Sender
from flotilla_weights.inbox import Inbox
from flotilla_weights.manifest import Bucket, Manifest

Weights = dict[str, torch.Tensor]
SECRET = b"of the test"


def model(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (64, 33),
        "model.layers.0.mlp.up_proj.weight": (129, 33),
        "model.layers.0.norm.weight": (33,),
        "model.layers.1.mlp.up_proj.weight": (300, 33),
        "model.layers.1.norm.weight": (33,),
        "model.norm.weight": (33,),
    }
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["model.layers.0.norm.weight"] = weights["model.layers.0.norm.weight"].bfloat16()
    return weights


def manifest_of(weights: Weights, bucket_bytes: int = 20_000) -> Manifest:
    return Manifest.from_named(((n, t.dtype, t.shape) for n, t in weights.items()), bucket_bytes)


def group_of(
    sender: Sender, world_size: int, epoch: int = 1, timeout_s: float = 10.0
) -> weights_pb2.WeightGroup:
    return group_at(sender.port, world_size, timeout_s, sender.secret, epoch)


def group_at(
    port: int, world_size: int, timeout_s: float, secret: bytes = b"", epoch: int = 1
) -> weights_pb2.WeightGroup:
    group = weights_pb2.WeightGroup(epoch=epoch, backend=weights_pb2.WEIGHT_BACKEND_GLOO, host="127.0.0.1")
    group.port, group.secret, group.world_size = port, secret, world_size
    group.timeout.FromNanoseconds(int(timeout_s * 1e9))
    group.sender_ranks.append(0)
    return group


def in_order(manifest: Manifest, weights: Weights) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, weights[spec.name]) for spec in manifest.tensors]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


def start(
    pool: ThreadPoolExecutor, receiver: Receiver, into: Weights, rounds: int = 1
) -> Future[list[list[int]]]:
    def work() -> list[list[int]]:
        receiver.connect()
        return [receiver.receive(into.update) for _ in range(rounds)]

    return pool.submit(work)


def test_two_receivers_get_every_tensor_bit_for_bit_round_after_round(pool):
    first, second = model(1), model(2)
    manifest = manifest_of(first)
    assert len(manifest.buckets) > 3
    sender = Sender.listen("127.0.0.1", 1, 3, "gloo", 10.0)
    arrived: list[Weights] = [{}, {}]
    receivers = [Receiver(group_of(sender, 3), rank, manifest) for rank in (1, 2)]
    futures = [start(pool, r, into, rounds=2) for r, into in zip(receivers, arrived, strict=True)]
    sender.connect(manifest)
    digests = [sender.publish(manifest, in_order(manifest, weights)) for weights in (first, second)]
    for future, into in zip(futures, arrived, strict=True):
        assert future.result() == digests
        assert into.keys() == second.keys()
        for name, tensor in second.items():
            assert into[name].dtype == tensor.dtype and torch.equal(into[name], tensor)
    assert digests[1] == tensor_digests(tensor for _, tensor in in_order(manifest, second))
    sender.close()
    for receiver in receivers:
        receiver.close()


def test_a_receiver_with_another_manifest_is_refused_by_rank(pool):
    weights = model()
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    without_norm = {n: t for n, t in weights.items() if n != "model.norm.weight"}
    future = start(pool, Receiver(group_of(sender, 2), 1, manifest_of(without_norm)), {})
    with pytest.raises(WeightGroupFailed, match="another manifest"):
        sender.connect(manifest_of(weights))
    with pytest.raises(WeightGroupFailed):
        future.result()


@pytest.mark.parametrize(
    ("name", "other", "told"),
    [
        ("model.layers.1.norm.weight", torch.randn(34), r"model\.layers\.1\.norm\.weight"),
        ("model.norm.weight", torch.ones(33).long(), r"model\.norm\.weight torch\.int64"),
    ],
    ids=["another shape", "integers"],
)
def test_publishing_another_tensor_than_the_manifest_has_names_it(pool, name, other, told):
    weights = model()
    manifest = manifest_of(weights)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    future = start(pool, Receiver(group_of(sender, 2), 1, manifest), {})
    sender.connect(manifest)
    weights[name] = other
    with pytest.raises(WeightsMismatch, match=told):
        sender.publish(manifest, in_order(manifest, weights))
    with pytest.raises(WeightGroupFailed, match=told):
        future.result()


def test_numbers_of_a_wider_type_are_rounded_as_torch_rounds_them(pool):
    wide = model()
    narrow = {name: tensor.bfloat16() for name, tensor in wide.items()}
    manifest = manifest_of(narrow)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    arrived: Weights = {}
    future = start(pool, Receiver(group_of(sender, 2), 1, manifest), arrived)
    sender.connect(manifest)
    digests = sender.publish(manifest, in_order(manifest, wide))
    assert future.result(timeout=10) == [digests]
    assert digests == tensor_digests(tensor for _, tensor in in_order(manifest, narrow))
    assert all(torch.equal(arrived[name], tensor) for name, tensor in narrow.items())


def test_a_member_that_never_joins_is_named_at_the_timeout():
    sender = Sender.listen("127.0.0.1", 1, 3, "gloo", 0.5)
    started = time.monotonic()
    with pytest.raises(WeightGroupFailed, match="rank 1, 2 of 3"):
        sender.connect(manifest_of(model()))
    assert time.monotonic() - started < 3


def test_a_receiver_that_nobody_publishes_to_ends_at_the_timeout(pool):
    manifest = manifest_of(model())
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    future = start(pool, Receiver(group_of(sender, 2, timeout_s=0.5), 1, manifest), {})
    sender.connect(manifest)
    with pytest.raises(WeightGroupFailed, match="waiting for the sender to publish"):
        future.result(timeout=5)


def receiver_at(port: int, timeout_s: float) -> Receiver:
    return Receiver(group_at(port, 2, timeout_s), 1, manifest_of(model()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_is_refused_by_both_ends_where_there_is_no_gpu():
    with pytest.raises(FailedPrecondition, match="weights cannot travel by nccl here"):
        Sender.listen("127.0.0.1", 1, 2, "nccl", 5.0)
    group = weights_pb2.WeightGroup(epoch=1, backend=weights_pb2.WEIGHT_BACKEND_NCCL, world_size=2)
    with pytest.raises(FailedPrecondition, match="weights cannot travel by nccl here"):
        Receiver(group, 1, manifest_of(model()))


def test_a_wrong_address_fails_at_once_and_is_no_fault_of_the_group():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(Unavailable, match="does not answer"):
        receiver_at(port, 20.0).connect()
    assert time.monotonic() - started < 2


def test_a_store_that_is_silent_is_waited_for_until_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"does not answer.*silent for 0\.5 s"):
            receiver_at(silent.getsockname()[1], 0.5).connect()
        assert time.monotonic() - started < 3


def test_abort_ends_the_wait_for_a_store_that_is_silent(pool):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        receiver = receiver_at(silent.getsockname()[1], 60.0)
        dialing = pool.submit(receiver.connect)
        dialed, _ = silent.accept()
        receiver.abort("the replica leaves")
        with pytest.raises(WeightGroupFailed, match="the replica leaves"):
            dialing.result(timeout=5)
        dialed.close()


def test_a_sender_cannot_listen_on_an_address_of_somebody_else():
    with pytest.raises(FailedPrecondition, match=r"cannot be opened on 203\.0\.113\.7.*bind\.host"):
        Sender.listen("203.0.113.7", 1, 2, "gloo", 10.0)


def test_a_sender_is_reached_under_another_name_than_it_listens_on(pool):
    weights = model()
    manifest = manifest_of(weights)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    announced = group_of(sender, 2)
    announced.host = "localhost"
    arrived: Weights = {}
    future = start(pool, Receiver(announced, 1, manifest), arrived)
    sender.connect(manifest)
    assert [sender.publish(manifest, in_order(manifest, weights))] == future.result(timeout=10)
    assert arrived.keys() == weights.keys()


def test_abort_ends_a_join_and_a_publication_in_progress(pool):
    manifest = manifest_of(model())
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 30.0)
    joining = pool.submit(sender.connect, manifest)
    sender.abort("the run was stopped")
    with pytest.raises(WeightGroupFailed, match="the run was stopped"):
        joining.result(timeout=5)

    other = Sender.listen("127.0.0.1", 2, 2, "gloo", 30.0)
    receiver = Receiver(group_of(other, 2, epoch=2, timeout_s=30.0), 1, manifest)
    receiving = start(pool, receiver, {})
    other.connect(manifest)
    receiver.abort("the replica leaves")
    with pytest.raises(WeightGroupFailed, match="the replica leaves"):
        receiving.result(timeout=5)
    with pytest.raises(WeightGroupFailed, match="the replica leaves"):
        other.publish(manifest, in_order(manifest, model()))


def test_an_abort_while_a_bucket_is_packed_is_an_error_of_the_group_and_no_other(pool):
    weights = model()
    manifest = manifest_of(weights, bucket_bytes=1)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    future = start(pool, Receiver(group_of(sender, 2), 1, manifest), arrived := {})

    def given_up_on_the_way():
        for index, (name, tensor) in enumerate(in_order(manifest, weights)):
            if index == 3:
                while len(arrived) < 2:  # the first transfers are done, and nobody has finished them
                    time.sleep(0.001)
                sender.abort("the coordinator closed the weight group")
            yield name, tensor

    sender.connect(manifest)
    with pytest.raises(WeightGroupFailed, match="aborted"):
        sender.publish(manifest, given_up_on_the_way())
    with pytest.raises(WeightGroupFailed):
        future.result()


def test_a_sender_that_cannot_go_on_ends_the_group_long_before_the_timeout(pool):
    weights = model()
    manifest = manifest_of(weights)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 60.0)
    taking = start(pool, Receiver(group_of(sender, 2, timeout_s=60.0), 1, manifest), {})
    sender.connect(manifest)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from in_order(manifest, weights)[:3]
        raise torch.OutOfMemoryError("no room for the next gather")

    with pytest.raises(torch.OutOfMemoryError):
        sender.publish(manifest, source())
    with pytest.raises(WeightGroupFailed, match="rank 0: sending failed: OutOfMemoryError: no room"):
        taking.result(20.0)


def test_publishing_before_anybody_joined_is_an_error_of_the_group():
    weights = model()
    manifest = manifest_of(weights)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    with pytest.raises(WeightGroupFailed, match="not connected"):
        sender.publish(manifest, in_order(manifest, weights))


def test_an_error_of_the_sink_does_not_hold_up_the_others(pool):
    weights = model()
    manifest = manifest_of(weights)
    sender = Sender.listen("127.0.0.1", 1, 3, "gloo", 10.0)
    good: Weights = {}
    healthy = start(pool, Receiver(group_of(sender, 3), 1, manifest), good)
    broken = Receiver(group_of(sender, 3), 2, manifest)

    def refuse(_named: object) -> None:
        raise MemoryError("no room to stage")

    def work() -> None:
        broken.connect()
        broken.receive(refuse)

    failing = pool.submit(work)
    sender.connect(manifest)
    digests = sender.publish(manifest, in_order(manifest, weights))
    assert healthy.result(timeout=5) == [digests]
    with pytest.raises(MemoryError, match="no room to stage"):
        failing.result(timeout=5)


def test_a_receiver_that_cannot_go_on_ends_the_group_long_before_the_timeout(pool, monkeypatch):
    weights = model()
    manifest = manifest_of(weights, bucket_bytes=1)
    sender = Sender.listen("127.0.0.1", 1, 3, "gloo", 60.0)
    broken, healthy = (Receiver(group_of(sender, 3, timeout_s=60.0), rank, manifest) for rank in (1, 2))
    arrivals = broken._arrivals

    def first_alone(manifest, lent):
        yield next(arrivals(manifest, lent))
        raise MemoryError("no room for the next bucket")

    monkeypatch.setattr(broken, "_arrivals", first_alone)
    failing, other = start(pool, broken, {}), start(pool, healthy, {})
    sender.connect(manifest)
    publishing = pool.submit(sender.publish, manifest, in_order(manifest, weights))
    with pytest.raises(MemoryError, match="no room for the next bucket"):
        failing.result(timeout=10)
    for future in (publishing, other):
        with pytest.raises(WeightGroupFailed, match=r"rank 1: receiving failed.*no room for the next bucket"):
            future.result(timeout=10)


def refuse_with_an_error(_named: object) -> None:
    raise MemoryError("no room to stage")


@pytest.mark.parametrize("broken_by", ["the sender", "the sink"])
def test_a_broken_transfer_frees_what_it_received_without_a_garbage_collection(pool, monkeypatch, broken_by):
    weights = model()
    manifest = manifest_of(weights, bucket_bytes=1)
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    receiver = Receiver(group_of(sender, 2), 1, manifest)
    inbox = Inbox(receiver, manifest)
    arrived: list[weakref.ref[torch.Tensor]] = []
    something_arrived = threading.Event()

    def unpacked(bucket: Bucket, message: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        named = unpack(bucket, message)
        arrived.extend(weakref.ref(tensor) for _, tensor in named)
        something_arrived.set()
        return named

    unpack = group.unpack
    monkeypatch.setattr(group, "unpack", unpacked)
    progress = refuse_with_an_error if broken_by == "the sink" else lambda _: None

    def receive() -> str:
        receiver.connect()
        try:
            inbox.receive(progress)
        except (WeightGroupFailed, MemoryError) as error:
            return str(error)
        return ""

    def tensors():
        for index, (name, tensor) in enumerate(in_order(manifest, weights)):
            if index == 4 and broken_by == "the sender":
                assert something_arrived.wait(10)
                sender.abort("the coordinator closed the weight group")
            yield name, tensor

    gc.collect()
    gc.disable()
    try:
        future = pool.submit(receive)
        sender.connect(manifest)
        with suppress(WeightGroupFailed):
            sender.publish(manifest, tensors())
        assert future.result(timeout=10)
        assert arrived and not [name for ref in arrived if (name := ref()) is not None]
        receiver.close()
    finally:
        gc.enable()


PEER = """
import sys, threading
import torch
from flotilla.common.v1 import weights_pb2
from flotilla_weights.group import Receiver, Sender
from flotilla_weights.manifest import Manifest

role, timeout_s = sys.argv[1], float(sys.argv[2])
manifest = Manifest.from_named([(f"layers.{i}.w", "float32", (256, 256)) for i in range(40)], 300_000)
if role == "sender":
    sender = Sender.listen("127.0.0.1", 1, 3, "gloo", timeout_s, secret=b"of the test")
    print(sender.port, flush=True)
    sender.connect(manifest)

    def tensors():
        for index, spec in enumerate(manifest.tensors):
            if index == 20:
                print("halfway", flush=True)
                threading.Event().wait()
            yield spec.name, torch.zeros(spec.shape)

    sender.publish(manifest, tensors())
else:
    print("ready", flush=True)
    port = int(sys.stdin.readline())
    group = weights_pb2.WeightGroup(epoch=1, backend=1, host="127.0.0.1", port=port, world_size=3, sender_ranks=[0])
    group.secret = b"of the test"
    group.timeout.FromNanoseconds(int(timeout_s * 1e9))
    receiver = Receiver(group, 2, manifest)
    receiver.connect()
    print("joined", flush=True)
    threading.Event().wait()
"""
PEER_MANIFEST = Manifest.from_named([(f"layers.{i}.w", "float32", (256, 256)) for i in range(40)], 300_000)


def spawn(role: str, timeout_s: float) -> subprocess.Popen[str]:
    """Start a peer; its first line says that its imports, which can take longer than any timeout here, are done."""
    command = [sys.executable, "-c", PEER, role, str(timeout_s)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def test_a_sender_killed_mid_broadcast_ends_every_receiver_long_before_the_timeout(pool):
    peer = spawn("sender", 60.0)
    try:
        assert peer.stdout
        group = group_at(int(peer.stdout.readline()), 3, 60.0, SECRET)
        futures = [start(pool, Receiver(group, rank, PEER_MANIFEST), {}) for rank in (1, 2)]
        assert peer.stdout.readline().strip() == "halfway"
        peer.send_signal(signal.SIGKILL)
        peer.wait()
        started = time.monotonic()
        for future in futures:
            with pytest.raises(WeightGroupFailed):
                future.result(timeout=10)
        assert time.monotonic() - started < 5
    finally:
        peer.kill()
        peer.wait()


def test_a_receiver_killed_before_the_broadcast_fails_the_publication(pool):
    peer = spawn("receiver", 6.0)
    try:
        assert peer.stdin and peer.stdout and peer.stdout.readline().strip() == "ready"
        sender = Sender.listen("127.0.0.1", 1, 3, "gloo", 6.0, secret=SECRET)
        print(sender.port, file=peer.stdin, flush=True)
        healthy = start(pool, Receiver(group_of(sender, 3, timeout_s=6.0), 1, PEER_MANIFEST), {})
        sender.connect(PEER_MANIFEST)
        assert peer.stdout.readline().strip() == "joined"
        peer.send_signal(signal.SIGKILL)
        peer.wait()
        zeros = ((spec.name, torch.zeros(spec.shape)) for spec in PEER_MANIFEST.tensors)
        with pytest.raises(WeightGroupFailed):
            sender.publish(PEER_MANIFEST, zeros)
        with pytest.raises(WeightGroupFailed):
            healthy.result(timeout=10)
    finally:
        peer.kill()
        peer.wait()


def test_a_new_epoch_works_after_a_broken_one_and_for_its_own_members_alone(pool):
    weights = model()
    manifest = manifest_of(weights)
    broken = Sender.listen("127.0.0.1", 1, 2, "gloo", 10.0)
    first = start(pool, Receiver(group_of(broken, 2), 1, manifest), {})
    broken.connect(manifest)
    broken.abort("test")
    with pytest.raises(WeightGroupFailed):
        first.result(timeout=5)
    again = Sender.listen("127.0.0.1", 2, 2, "gloo", 10.0)
    for secret in (b"", b"0" * 32, broken.secret):
        with pytest.raises(Unavailable, match="does not prove that it is in this weight group"):
            Receiver(group_at(again.port, 2, 10.0, secret, epoch=2), 1, manifest).connect()
    second = start(pool, Receiver(group_of(again, 2, epoch=2), 1, manifest), {})
    again.connect(manifest)
    assert [again.publish(manifest, in_order(manifest, weights))] == second.result(timeout=5)


def test_ranks_outside_the_group_are_refused():
    sender = Sender.listen("127.0.0.1", 1, 2, "gloo", 1.0)
    with pytest.raises(InvalidRequest, match="rank 2"):
        Receiver(group_of(sender, 2), 2, manifest_of(model()))
    assert threading.active_count() < 50
