"""Claims about ranks that each send the weights to the generator on their own GPU, and about what they gather."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flotilla.common.v1 import weights_pb2
from flotilla_core.errors import FlotillaError
from flotilla_testing.listening_front import ListeningFront
from flotilla_testing.pretend_gpus import PretendGpus
from flotilla_trainer.rank.cut import RankMesh, gathered, rows_of
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.publisher import Publisher
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_weights.digest import tensor_digests
from flotilla_weights.group import Receiver
from flotilla_weights.manifest import Manifest

pytestmark = pytest.mark.timeout(120)
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
CPU = torch.device("cpu")
LIMIT_S = 10.0
BUCKET_BYTES = 4000
SECRET = b"of the test"


def loaded(folder: Path, replicate: int = 1) -> ShardedModel:
    model = ShardedModel(folder, torch.bfloat16, RankMesh.form("cpu", replicate=replicate), CPU, PolicyModel)
    model.load(folder)
    return model


def rows_differ(folder: Path, replicate: int) -> list[str]:
    """The tensors that differ when they are gathered in groups."""
    model = loaded(folder, replicate)
    named = [(name, p.detach()) for name, p in model.causal_lm.named_parameters()]
    groups = [named[:1], named[1:8], named[8:]]
    found = {name: torch.cat(rows) for name, rows in rows_of(groups, torch.bfloat16)}
    assert list(found) == [name for name, _ in named]
    return [name for name, tensor in named if not torch.equal(found[name], gathered(tensor).bfloat16())]


@pytest.mark.parametrize(("ranks", "replicate"), [(2, 1), (4, 2)])
def test_rows_gathered_in_groups_are_those_of_whole_tensors(
    folder: Path, on_ranks: OnRanks, ranks: int, replicate: int
) -> None:
    assert on_ranks(ranks, lambda: rows_differ(folder, replicate)) == [[]] * ranks


class Pair:
    """A rank and the generator on its GPU, which is a thread of the same process."""

    def __init__(self, folder: Path) -> None:
        PretendGpus(f"GPU-{dist.get_rank()}").replace_real_ones()
        self.model = loaded(folder)
        self._publisher = Publisher(self.model, ListeningFront())  # type: ignore[arg-type]
        self._pool = ThreadPoolExecutor(1)
        self.arrived: dict[str, torch.Tensor] = {}

    def open(self, epoch: int, generators: int = 2, *, leaves: bool = False) -> Future[list[int]]:
        """Form the group; return the digests that the generator will have of one publication."""
        senders = [0, 1 + generators]
        opened = self._publisher.open(
            {
                "host": "127.0.0.1",
                "secret": SECRET.hex(),
                "epoch": epoch,
                "world_size": generators + 2,
                "senders": senders,
                "backend": "nccl",
                "timeout_s": LIMIT_S,
                "bucket_bytes": BUCKET_BYTES,
            }
        )
        if dist.get_rank() >= generators:
            return Future()
        return self._pool.submit(self._receive, opened, epoch, senders, leaves)

    def publish(self, epoch: int) -> Any:
        """Return what the rank answers, or how it fails."""
        try:
            return self._publisher.publish({"epoch": epoch, "bucket_bytes": BUCKET_BYTES}).get("digests")
        except FlotillaError as error:
            return str(error)

    def _receive(self, opened: dict[str, Any], epoch: int, senders: list[int], leaves: bool) -> list[int]:
        group = weights_pb2.WeightGroup(
            epoch=epoch,
            backend=weights_pb2.WEIGHT_BACKEND_NCCL,
            host=opened["host"],
            port=opened["port"],
            secret=SECRET,
            world_size=1 + senders[-1],
            sender_ranks=senders,
        )
        group.timeout.FromNanoseconds(int(LIMIT_S * 1e9))
        described = weights_pb2.WeightManifest.FromString(bytes.fromhex(opened["manifest"]))
        receiver = Receiver(group, 1 + dist.get_rank(), Manifest.from_proto(described))
        receiver.connect()
        if leaves:
            receiver.abort("the replica leaves")
            return []
        return receiver.receive(self.arrived.update)


def published(folder: Path) -> dict[str, Any]:
    """What one rank and its generator have after publications: to both, to the first, to a second one that leaves."""
    pair = Pair(folder)
    taking = pair.open(1)
    sent = pair.publish(1)
    taken = taking.result(LIMIT_S)
    whole = dict(pair.model.whole_tensors(pair.arrived, torch.bfloat16))
    generator = pair.open(2, generators=1)
    alone = pair.publish(2)
    pair.open(3, leaves=dist.get_rank() == 1)
    failed = pair.publish(3)
    # The ranks are still in step.
    again = list(pair.model.whole_tensors(pair.arrived, torch.bfloat16))
    return {
        "sent": sent,
        "taken": taken,
        "expected": tensor_digests(whole.values()),
        "equal": all(torch.equal(pair.arrived[name], tensor) for name, tensor in whole.items()),
        "alone": alone,
        "taken_alone": generator.result(LIMIT_S) if dist.get_rank() == 0 else None,
        "failed": failed,
        "in_step": len(again) == len(whole),
    }


def test_each_rank_sends_the_same_to_its_generator_and_a_loss_costs_the_group_alone(
    folder: Path, on_ranks: OnRanks
) -> None:
    both = on_ranks(2, lambda: published(folder))
    for found in both:
        assert found["sent"] == found["taken"] == found["expected"]
        assert found["equal"] and found["in_step"]
        assert found["alone"] == found["taken_alone"]
    assert [found["alone"] for found in both] == [both[0]["sent"], None]
    # The other rank may have been done with its own generator by then.
    assert "rank 2: aborted: the replica leaves" in both[1]["failed"]
