"""Claims about weights that move through memory which all members see; here it is the memory of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import WeightGroupFailed
from flotilla_weights import group as groups
from flotilla_weights import wire
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Receiver, Sender
from flotilla_weights.manifest import Manifest
from flotilla_weights.process_group import carrier_between

LIMIT_S = 10.0
COUNT = 3
NBYTES = 5000
MANIFEST = Manifest.from_named(
    [
        ("model.embed_tokens.weight", "float32", (64, 33)),
        ("model.layers.0.up.weight", "bfloat16", (129, 33)),
        ("model.layers.0.norm.weight", "float32", (33,)),
        ("model.layers.1.up.weight", "float32", (300, 33)),
        ("model.norm.weight", "float32", (33,)),
    ],
    20_000,
)


class HostBuckets:
    """Buckets in memory that threads share; copies end when they are asked for the second time."""

    count = COUNT
    nbytes = NBYTES

    def __init__(self, memory: torch.Tensor, closed: list[HostBuckets]) -> None:
        self._memory = memory
        self._closed = closed

    def write(self, bucket: int, piece: torch.Tensor) -> Callable[[], bool]:
        return self._copied(self._part(bucket, piece), piece)

    def read(self, bucket: int, piece: torch.Tensor) -> Callable[[], bool]:
        return self._copied(piece, self._part(bucket, piece))

    def close(self) -> None:
        self._closed.append(self)

    def _part(self, bucket: int, piece: torch.Tensor) -> torch.Tensor:
        return self._memory[bucket * NBYTES :][: piece.numel()]

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        asked = iter([False])

        def ended() -> bool:
            if next(asked, True):
                return True
            target.copy_(source)
            return False

        return ended


class OneGpu:
    """What the tests replace of a GPU, and what happened to it."""

    def __init__(self) -> None:
        self.memory = torch.empty(COUNT * NBYTES, dtype=torch.uint8)
        self.closed: list[HostBuckets] = []
        self.unmappable: set[str] = set()

    def own(self, _device: torch.device) -> tuple[HostBuckets, str]:
        return HostBuckets(self.memory, self.closed), "the memory"

    def mapped(self, description: str, _device: torch.device) -> HostBuckets:
        if description in self.unmappable:
            raise RuntimeError("cuIpcOpenMemHandle_v2 failed with 101: invalid device ordinal")
        return HostBuckets(self.memory, self.closed)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> OneGpu:
    one = OneGpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(groups, "_device_for", lambda _backend, _device: torch.device("cpu"))
    monkeypatch.setattr(wire, "gpu_of", lambda _: "GPU-1")
    monkeypatch.setattr(wire, "own_buckets", one.own)
    monkeypatch.setattr(wire, "mapped_buckets", one.mapped)
    return one


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def weights_of(seed: int) -> list[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (spec.name, torch.randn(spec.shape, generator=random).to(spec.torch_dtype))
        for spec in MANIFEST.tensors
    ]


def receiver_of(sender: Sender, rank: int, world_size: int, timeout_s: float = LIMIT_S) -> Receiver:
    described = weights_pb2.WeightGroup(
        epoch=1,
        backend=weights_pb2.WEIGHT_BACKEND_NCCL,
        host=sender.host,
        port=sender.port,
        world_size=world_size,
    )
    described.timeout.FromNanoseconds(int(timeout_s * 1e9))
    return Receiver(described, rank, MANIFEST)


def listening(world_size: int, timeout_s: float = LIMIT_S) -> Sender:
    return Sender.listen("127.0.0.1", 1, world_size, "nccl", timeout_s)


def test_members_on_one_gpu_get_every_tensor_bit_for_bit_round_after_round(
    gpu: OneGpu, pool: ThreadPoolExecutor
) -> None:
    sender = listening(3)
    receivers = [receiver_of(sender, rank, 3) for rank in (1, 2)]
    arrived: list[dict[str, torch.Tensor]] = [{}, {}]

    def receive(receiver: Receiver, into: dict[str, torch.Tensor]) -> list[list[int]]:
        receiver.connect()
        return [receiver.receive(into.update) for _ in range(3)]

    taking = [pool.submit(receive, *pair) for pair in zip(receivers, arrived, strict=True)]
    sender.connect(MANIFEST)
    sent = [sender.publish(MANIFEST, weights_of(seed)) for seed in range(3)]
    for future, into in zip(taking, arrived, strict=True):
        assert future.result(LIMIT_S) == sent
        assert all(torch.equal(into[name], tensor) for name, tensor in weights_of(2))
    assert sent[2] == tensor_digests(tensor for _, tensor in weights_of(2))
    assert not gpu.closed
    for end in (sender, *receivers):
        end.close()
        end.close()
    assert len(gpu.closed) == 3


def test_a_receiver_that_takes_nothing_is_waited_for_until_the_timeout_and_no_longer(
    gpu: OneGpu, pool: ThreadPoolExecutor
) -> None:
    sender = listening(2, timeout_s=0.5)
    receiver = receiver_of(sender, 1, 2)
    joining = pool.submit(receiver.connect)
    sender.connect(MANIFEST)
    joining.result(LIMIT_S)
    with pytest.raises(WeightGroupFailed, match=r"no progress for 0\.5 s.*sending bucket 1 of"):
        sender.publish(MANIFEST, weights_of(0))
    with pytest.raises(WeightGroupFailed, match="another member of the weight group failed"):
        receiver.receive(lambda _: None)
    assert len(gpu.closed) == 2


def test_an_abort_ends_a_publication_under_way_at_both_ends(gpu: OneGpu, pool: ThreadPoolExecutor) -> None:
    sender = listening(2, timeout_s=60.0)
    receiver = receiver_of(sender, 1, 2, timeout_s=60.0)
    halfway, given_up = threading.Event(), threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, named in enumerate(weights_of(0)):
            if index == 3:
                halfway.set()
                given_up.wait(LIMIT_S)
            yield named

    def receive() -> None:
        receiver.connect()
        receiver.receive(lambda _: None)

    taking = pool.submit(receive)
    sender.connect(MANIFEST)
    publishing = pool.submit(sender.publish, MANIFEST, tensors())
    assert halfway.wait(LIMIT_S)
    receiver.abort("the replica leaves")
    given_up.set()
    for future in (taking, publishing):
        with pytest.raises(WeightGroupFailed, match="the replica leaves"):
            future.result(LIMIT_S)
    assert len(gpu.closed) == 2


def test_a_receiver_that_cannot_map_the_buckets_says_so_to_all(gpu: OneGpu, pool: ThreadPoolExecutor) -> None:
    gpu.unmappable.add("the memory")
    sender = listening(2)
    joining = pool.submit(receiver_of(sender, 1, 2).connect)
    with pytest.raises(WeightGroupFailed, match=r"rank 1: the group could not be connected: cuIpcOpen"):
        sender.connect(MANIFEST)
    with pytest.raises(WeightGroupFailed, match=r"invalid device ordinal; weights\.backend: gloo"):
        joining.result(LIMIT_S)


@pytest.mark.parametrize(
    ("backend", "gpus", "carrier"),
    [
        ("nccl", ["a", "b", "c"], "nccl"),
        ("nccl", ["a", "a", "a"], "cuda_ipc"),
        ("nccl", ["a", "a", "b"], "gloo"),
        ("gloo", ["a", "a"], "gloo"),
    ],
)
def test_the_carrier_follows_from_who_shares_a_gpu(backend: str, gpus: list[str], carrier: str) -> None:
    assert carrier_between(backend, gpus) == carrier
