"""Claims about the part of a parameter that each rank holds, of parameters that FSDP has cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from flotilla_core.errors import Unimplemented
from flotilla_trainer.rank.cut import Cut, RankMesh, gathered, local, scatter

pytestmark = pytest.mark.timeout(120)
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
SHAPES = [(1,), (2, 3), (5,), (7, 2, 3), (31, 4)]
MIXED: list[tuple[Placement, ...]] = [
    (Shard(1),),
    (Replicate(),),
    (Partial(),),
    (_StridedShard(0, split_factor=2),),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor in which no number is there twice."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def sharded(replicate: int) -> dict[str, nn.Parameter]:
    model = nn.ParameterList(numbered(shape) for shape in SHAPES)
    fully_shard(model, mesh=RankMesh.form("cpu", replicate=replicate).weights)
    return dict(model.named_parameters())


@torch.no_grad()
def held(replicate: int = 1) -> dict[tuple[int, ...], dict[str, Any]]:
    """Return what this rank holds of each parameter, and what its cut says about that."""
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for shape, (name, parameter) in zip(SHAPES, sharded(replicate).items(), strict=True):
        cut, part = Cut.of(name, parameter), local(parameter).clone()
        whole = numbered(shape)
        ranks = dist.get_process_group_ranks(cut.group)
        assert torch.equal(whole.narrow(cut.dim, cut.offset, cut.size), part)
        assert cut.whole == shape and cut.shapes()[ranks.index(dist.get_rank())] == tuple(part.shape)
        assert torch.equal(gathered(parameter), whole)
        local(parameter).zero_()
        scatter(name, whole if dist.get_rank() == 0 else torch.zeros(shape), parameter)
        assert torch.equal(local(parameter), part)
        found[shape] = {"numbers": part.flatten().tolist(), "counts": cut.counts, "ranks": ranks}
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_parts_of_all_ranks_are_the_parameter_once_and_in_their_order(
    on_ranks: OnRanks, ranks: int
) -> None:
    answers = on_ranks(ranks, held)
    for shape in SHAPES:
        numbers = [number for found in answers for number in found[shape]["numbers"]]
        assert numbers == numbered(shape).flatten().tolist()
        assert all(found[shape]["counts"] for found in answers)


def test_of_copies_one_counts(on_ranks: OnRanks) -> None:
    answers = on_ranks(4, lambda: held(replicate=2))
    for shape in SHAPES:
        counted, every = Counter[float](), Counter[float]()
        for found in answers:
            every.update(found[shape]["numbers"])
            counted.update(found[shape]["numbers"] * found[shape]["counts"])
        assert counted == Counter(numbered(shape).flatten().tolist())
        assert every == counted + counted
        assert [found[shape]["ranks"] for found in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_what_is_not_sharded_is_whole_on_every_rank_and_counts_once(on_ranks: OnRanks) -> None:
    def places() -> list[tuple[int, int, bool, tuple[int, ...]]]:
        cuts = [Cut.of("adapter", torch.zeros(shape)) for shape in SHAPES]
        return [(cut.offset, cut.size, cut.counts, cut.mesh_dims) for cut in cuts]

    assert on_ranks(2, places) == [[(0, shape[0], rank == 0, ()) for shape in SHAPES] for rank in (0, 1)]


def refusals() -> list[str]:
    messages = []
    for placements in MIXED:
        mesh = init_device_mesh("cpu", (1,) * len(placements))
        tensor = DTensor.from_local(torch.zeros(4, 4), mesh, placements, run_check=False)
        with pytest.raises(Unimplemented) as refused:
            Cut.of("layers.3.weight", tensor)
        messages.append(str(refused.value))
    return messages


def test_any_other_placement_is_refused_with_the_name_of_the_parameter(on_ranks: OnRanks) -> None:
    (messages,) = on_ranks(1, refusals)
    for placements, message in zip(MIXED, messages, strict=True):
        assert "layers.3.weight" in message and str(placements) in message
