"""Claims about weights that move through memory which all members see; here it is the memory of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import WeightGroupFailed
from flotilla_testing.pretend_gpus import PretendGpus
from flotilla_weights import group as groups
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Receiver, Sender
from flotilla_weights.manifest import Manifest
from flotilla_weights.process_group import Lane, lanes_between
from flotilla_weights.wire import Link

LIMIT_S = 10.0
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendGpus:
    gpus = PretendGpus()
    gpus.replace_real_ones(monkeypatch.setattr)
    return gpus


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


def receiver_of(
    sender: Sender,
    rank: int,
    world_size: int,
    timeout_s: float = LIMIT_S,
    senders: Sequence[int] = (0,),
    manifest: Manifest = MANIFEST,
) -> Receiver:
    described = weights_pb2.WeightGroup(
        epoch=1,
        backend=weights_pb2.WEIGHT_BACKEND_NCCL,
        host=sender.host,
        port=sender.port,
        secret=sender.secret,
        world_size=world_size,
        sender_ranks=senders,
    )
    described.timeout.FromNanoseconds(int(timeout_s * 1e9))
    return Receiver(described, rank, manifest)


def listening(world_size: int, timeout_s: float = LIMIT_S) -> Sender:
    return Sender.listen("127.0.0.1", 1, world_size, "nccl", timeout_s)


def test_members_on_one_gpu_get_every_tensor_bit_for_bit_round_after_round(
    gpu: PretendGpus, pool: ThreadPoolExecutor
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
    gpu: PretendGpus, pool: ThreadPoolExecutor
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


def test_an_abort_ends_a_publication_under_way_at_both_ends(
    gpu: PretendGpus, pool: ThreadPoolExecutor
) -> None:
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


def test_a_receiver_that_cannot_map_the_buckets_says_so_to_all(
    gpu: PretendGpus, pool: ThreadPoolExecutor
) -> None:
    gpu.unmappable.add("GPU-1")
    sender = listening(2)
    joining = pool.submit(receiver_of(sender, 1, 2).connect)
    with pytest.raises(WeightGroupFailed, match=r"rank 1: the group could not be connected: cuIpcOpen"):
        sender.connect(MANIFEST)
    with pytest.raises(WeightGroupFailed, match=r"invalid device ordinal; weights\.backend: gloo"):
        joining.result(LIMIT_S)


class Pairs:
    """Two GPUs, each with a rank of the trainer and a generator: ranks 0 and 3, and 1 and 2."""

    senders = (0, 3)

    def __init__(self, gpu: PretendGpus, pool: ThreadPoolExecutor, timeout_s: float = LIMIT_S) -> None:
        self._gpu = gpu
        self._pool = pool
        first = Sender.listen("127.0.0.1", 1, 4, "nccl", timeout_s, self.senders)
        link = Link(1, 3, 4, "nccl", timeout_s, self.senders)
        second = Sender(link, "127.0.0.1", first.port, first.secret)
        self.ranks = [first, second]
        self.receivers = [receiver_of(first, rank, 4, timeout_s, self.senders) for rank in (1, 2)]
        joining = [
            pool.submit(self._join, *pair) for pair in zip(self.receivers, self.memories(), strict=True)
        ]
        joining += [
            pool.submit(self._join, *pair, MANIFEST) for pair in zip(self.ranks, self.memories(), strict=True)
        ]
        for future in joining:
            future.result(LIMIT_S)

    @staticmethod
    def memories() -> tuple[str, str]:
        return "GPU-1", "GPU-2"

    def _join(self, member: Sender | Receiver, name: str, *manifest: Manifest) -> None:
        self._gpu.sit_on(name)
        member.connect(*manifest)

    def publishing(self, *weights: list[tuple[str, torch.Tensor]]) -> list[Future[list[int]]]:
        return [
            self._pool.submit(rank.publish, MANIFEST, sent)
            for rank, sent in zip(self.ranks, weights, strict=True)
        ]


def test_each_rank_sends_to_the_generator_on_its_own_gpu(gpu: PretendGpus, pool: ThreadPoolExecutor) -> None:
    pairs = Pairs(gpu, pool)
    arrived: list[dict[str, torch.Tensor]] = [{}, {}]
    for seed in range(2):
        taking = [
            pool.submit(receiver.receive, into.update)
            for receiver, into in zip(pairs.receivers, arrived, strict=True)
        ]
        ends = pairs.publishing(weights_of(seed), weights_of(seed)) + taking
        expected = tensor_digests(tensor for _, tensor in weights_of(seed))
        assert [end.result(LIMIT_S) for end in ends] == [expected] * 4
    for into in arrived:
        assert all(torch.equal(into[name], tensor) for name, tensor in weights_of(1))


def test_a_receiver_has_the_digests_of_the_rank_that_it_hears(
    gpu: PretendGpus, pool: ThreadPoolExecutor
) -> None:
    pairs = Pairs(gpu, pool)
    taking = [pool.submit(receiver.receive, lambda _: None) for receiver in pairs.receivers]
    sent = [end.result(LIMIT_S) for end in pairs.publishing(weights_of(0), weights_of(1))]
    assert [end.result(LIMIT_S) for end in taking] == sent
    assert sent[0] != sent[1]


def test_a_receiver_that_one_rank_cannot_reach_ends_the_group_for_all(
    gpu: PretendGpus, pool: ThreadPoolExecutor
) -> None:
    pairs = Pairs(gpu, pool, timeout_s=60.0)
    walked: list[str] = []

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(0):
            walked.append(name)
            yield name, tensor

    tensors = walk()
    taking = pool.submit(pairs.receivers[0].receive, lambda _: None)
    sending, stuck = pairs.publishing(tensors, weights_of(0))  # type: ignore[arg-type]
    taking.result(LIMIT_S)
    sending.result(LIMIT_S)
    assert len(walked) == len(MANIFEST.tensors)
    pairs.receivers[1].abort("the replica leaves")
    with pytest.raises(WeightGroupFailed, match="rank 2: aborted: the replica leaves"):
        stuck.result(LIMIT_S)
    with pytest.raises(WeightGroupFailed, match="the replica leaves"):
        pairs.ranks[0].publish(MANIFEST, weights_of(0))


def test_one_rank_sends_to_its_own_gpu_and_to_others_at_once(
    gpu: PretendGpus, pool: ThreadPoolExecutor
) -> None:
    sender = listening(3)
    receivers = [receiver_of(sender, rank, 3) for rank in (1, 2)]
    arrived: list[dict[str, torch.Tensor]] = [{}, {}]

    def receive(receiver: Receiver, name: str, into: dict[str, torch.Tensor]) -> list[list[int]]:
        gpu.sit_on(name)
        receiver.connect()
        return [receiver.receive(into.update) for _ in range(2)]

    taking = [
        pool.submit(receive, *each) for each in zip(receivers, ("GPU-1", "GPU-2"), arrived, strict=True)
    ]
    sender.connect(MANIFEST)
    sent = [sender.publish(MANIFEST, weights_of(seed)) for seed in range(2)]
    for future, into in zip(taking, arrived, strict=True):
        assert future.result(LIMIT_S) == sent
        assert all(torch.equal(into[name], tensor) for name, tensor in weights_of(1))


def test_transfers_that_are_queued_take_the_lent_buffers_in_turn(
    gpu: PretendGpus, pool: ThreadPoolExecutor
) -> None:
    manifest = Manifest(MANIFEST.tensors, bucket_bytes=1)
    assert len(manifest.buckets) > groups.BUCKETS_UNDER_WAY
    sender, receiver = (end := listening(2)), receiver_of(end, 1, 2, manifest=manifest)
    copies: dict[str, torch.Tensor] = {}

    def copy(named: list[tuple[str, torch.Tensor]]) -> None:
        copies.update((name, tensor.clone()) for name, tensor in named)

    def receive() -> list[list[int]]:
        gpu.sit_on("GPU-2")
        receiver.connect()
        return [receiver.receive(copy, lent=True) for _ in range(2)]

    taking = pool.submit(receive)
    sender.connect(manifest)
    sent = [
        sender.publish(manifest, [(name, tensor.double()) for name, tensor in weights_of(seed)])
        for seed in range(2)
    ]
    assert taking.result(LIMIT_S) == sent
    assert sent[1] == tensor_digests(tensor for _, tensor in weights_of(1))
    assert all(torch.equal(copies[name], tensor) for name, tensor in weights_of(1))
    assert receiver.buckets_received == len(manifest.buckets)


def test_rows_in_parts_arrive_as_whole_tensors_in_buffers_that_are_lent(
    gpu: PretendGpus, pool: ThreadPoolExecutor
) -> None:
    sender, receiver = (end := listening(2)), receiver_of(end, 1, 2)
    joining = pool.submit(receiver.connect)
    sender.connect(MANIFEST)
    joining.result(LIMIT_S)
    copies: dict[str, torch.Tensor] = {}
    buffers: set[int] = set()

    def copy(named: list[tuple[str, torch.Tensor]]) -> None:
        copies.update((name, tensor.clone()) for name, tensor in named)
        buffers.add(named[0][1].data_ptr())

    for seed in range(2):
        rows = [(name, list(tensor.float().split(50))) for name, tensor in weights_of(seed)]
        taking = pool.submit(receiver.receive, copy, lent=True)
        assert sender.publish(MANIFEST, rows) == taking.result(LIMIT_S)
        assert all(torch.equal(copies[name], tensor) for name, tensor in weights_of(seed))
    assert len(buffers) <= 2 * groups.BUCKETS_UNDER_WAY


@pytest.mark.parametrize(
    ("backend", "senders", "gpus", "lanes"),
    [
        ("nccl", [0], "abc", [Lane("nccl", 0, (1, 2))]),
        ("nccl", [0], "aaa", [Lane("cuda_ipc", 0, (1, 2))]),
        ("nccl", [0], "aab", [Lane("cuda_ipc", 0, (1,)), Lane("nccl", 0, (2,))]),
        ("nccl", [0], "abb", [Lane("gloo", 0, (1, 2))]),
        ("nccl", [0, 3], "aabb", [Lane("cuda_ipc", 0, (1,)), Lane("cuda_ipc", 3, (2,))]),
        ("nccl", [0, 3], "acbb", [Lane("cuda_ipc", 3, (2,)), Lane("nccl", 0, (1,))]),
        ("nccl", [0, 3], "accb", [Lane("gloo", 0, (1, 2))]),
        ("nccl", [0, 5], "aaccbb", [Lane("cuda_ipc", 5, (4,)), Lane("gloo", 0, (1, 2, 3))]),
        ("nccl", [0, 2, 3], "abcd", [Lane("nccl", 0, (1,))]),
        ("gloo", [0], "aa", [Lane("gloo", 0, (1,))]),
    ],
)
def test_a_receiver_hears_the_rank_on_its_gpu_or_the_first_one(
    backend: str, senders: list[int], gpus: str, lanes: list[Lane]
) -> None:
    assert list(lanes_between(backend, len(gpus), senders, gpus)) == lanes
