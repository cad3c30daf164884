"""A model whose weights rest in host memory trains, publishes and saves what a model on its device does, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from flotilla_core.config import BatchingConfig, CriticConfig, LoraConfig, OptimizerConfig, PolicyConfig
from flotilla_testing.listening_front import ListeningFront
from flotilla_testing.tiny_qwen3 import VOCABULARY
from flotilla_trainer.batch.packing import Layout, Sequences, pack
from flotilla_trainer.rank import update as update_module
from flotilla_trainer.rank.checkpoint import RankCheckpoints
from flotilla_trainer.rank.cut import RankMesh, gathered, local
from flotilla_trainer.rank.kept_whole import Kept
from flotilla_trainer.rank.objective import rank_objective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.reference_weights import ReferenceWeights
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import Update, finish
from flotilla_trainer.rank.value_model import ValueModel
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.objective import VALUE, ObjectiveSettings
from flotilla_trainer.wire.settings import SessionSettings
from flotilla_weights.digest import tensor_digests

pytestmark = pytest.mark.timeout(240)
CPU = torch.device("cpu")
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
Found = dict[str, Any]
OPTIMIZER = OptimizerConfig(epsilon=1e-3, max_grad_norm=0.1, weight_decay=0.1)
POLICY_SESSION = SessionSettings(ObjectiveSettings(), OPTIMIZER, BatchingConfig(), seed=0, total_updates=1)
CRITIC = ObjectiveSettings(VALUE, PolicyConfig(type="ppo", critic=CriticConfig()))
VALUE_SESSION = SessionSettings(CRITIC, OPTIMIZER, BatchingConfig(), seed=0, total_updates=1)


def command(number: int) -> Frame:
    """Return several micro-batches for this rank, other ones for each update."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    random = np.random.default_rng(number)
    lengths = np.array([9, 7, 12, 5, 11, 8, 6, 10] * 4)
    ends = np.cumsum(lengths)
    scored = np.concatenate(
        [np.arange(end - length + 2, end) for end, length in zip(ends, lengths, strict=True)]
    )
    columns = {
        name: random.normal(0, 1, len(scored)).astype(np.float32) / len(scored)
        for name in ("weights", "returns", "old_values")
    }
    tokens = random.integers(0, VOCABULARY, int(lengths.sum())).astype(np.int32)
    batches = pack(Sequences(tokens, lengths, scored, columns), Layout(32, ranks, packed=False))[rank]
    assert len(batches) > 2
    arrays: dict[str, Array] = {}
    for index, batch in enumerate(batches):
        arrays |= batch.arrays(index)
    return Frame("work", 0, {"idle": [batch.idle for batch in batches]}, arrays)


class Trainer:
    """One rank that learns."""

    def __init__(
        self,
        folder: Path,
        *,
        offload: bool,
        replicate: int = 1,
        lora: bool = False,
        kind: type[PolicyModel] | type[ValueModel] = PolicyModel,
    ) -> None:
        mesh = RankMesh.form("cpu", replicate=replicate)
        self.model = ShardedModel(folder, torch.bfloat16, mesh, CPU, kind, frozen=lora, cpu_offload=offload)
        self.model.load(folder)
        self.session = VALUE_SESSION if kind is ValueModel else POLICY_SESSION
        if kind is ValueModel:
            # A head of zeros would leave the body without a gradient.
            with torch.no_grad():
                local(self.model.trainable()["score.weight"]).fill_(0.1)
        if lora:
            self.model.adapt(LoraConfig(rank=4, alpha=8.0), seed=7)
        self.optimizer = PolicyOptimizer(self.model, OPTIMIZER)

    def accumulate(self, number: int) -> Update:
        line: Any = ListeningFront()
        update = Update(self.model, self.session, rank_objective(self.session.objective), line)
        update.accumulate(command(number), backward=True)
        return update

    def learn(self, numbers: range) -> list[dict[str, float]]:
        """Make updates; return their loss and gradient norm."""
        made = []
        for number in numbers:
            metrics, skipped = finish(self.accumulate(number), self.optimizer, 1e-2)
            assert not skipped
            made.append({name: metrics[name] for name in ("loss", "grad_norm")})
        return made

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {n: gathered(p.grad).clone() for n, p in self.model.trainable().items() if p.grad is not None}
        self.optimizer.discard_gradients()
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: gathered(p.detach()).clone() for name, p in self.model.trainable().items()}

    def digests(self) -> list[int]:
        """Return the digests of all that would be published."""
        names = [name for name, _, _ in self.model.specs(torch.bfloat16)]
        sent = self.model.rows_to_round([names[:3], names[3:]], torch.bfloat16)
        return tensor_digests([torch.cat(rows).bfloat16() for _, rows in sent])


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name, value in left.items() if not torch.equal(value, right[name])]


def updates_differ(folder: Path, **arrangement: Any) -> Any:
    """Return what differs after three updates, of which each adds up several micro-batches."""
    right, tried = (Trainer(folder, offload=offload, **arrangement) for offload in (False, True))
    made = [trainer.learn(range(3)) for trainer in (right, tried)]
    for trainer in (right, tried):
        trainer.accumulate(3)
    gradients = differing(*(trainer.gradients() for trainer in (right, tried)))
    weights = differing(*(trainer.weights() for trainer in (right, tried)))
    return made[0] == made[1], gradients, weights, right.digests() == tried.digests()


ARRANGEMENTS = [
    pytest.param(1, {}, id="one rank"),
    pytest.param(2, {}, id="two shards"),
    pytest.param(4, {"replicate": 2}, id="two copies of two shards"),
    pytest.param(2, {"lora": True}, id="adapters"),
]


@pytest.mark.parametrize(("ranks", "arrangement"), ARRANGEMENTS)
def test_losses_norms_gradients_weights_and_digests_are_those_of_a_resident_model(
    folder: Path, on_ranks: OnRanks, ranks: int, arrangement: Found
) -> None:
    assert on_ranks(ranks, lambda: updates_differ(folder, **arrangement)) == [(True, [], [], True)] * ranks


@pytest.mark.parametrize("kept", [Kept(weights=True), Kept(weights=True, gradients=True)], ids=str)
def test_the_same_where_a_device_keeps_weights_or_gradients_through_an_update(
    folder: Path, on_ranks: OnRanks, kept: Kept
) -> None:
    def act() -> Any:
        update_module.kept_by = lambda model, needed: (
            kept
        )  # of this rank alone, which is a process of its own
        return updates_differ(folder)

    assert on_ranks(2, act) == [(True, [], [], True)] * 2


def gradients_made_anew(folder: Path) -> list[bool]:
    trainer = Trainer(folder, offload=True)
    trainer.accumulate(0)
    first = [parameter.grad for parameter in trainer.model.parameters()]
    trainer.accumulate(1)
    return [p.grad is not old for p, old in zip(trainer.model.parameters(), first, strict=True)]


def test_the_host_adds_no_gradients(folder: Path, on_ranks: OnRanks) -> None:
    """A sum that FSDP makes on the host is made in the gradient that is there."""
    (anew,) = on_ranks(1, lambda: gradients_made_anew(folder))
    assert all(anew)


def test_parameters_that_nothing_reaches_have_no_gradient_and_the_others_all_of_theirs(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, is_decoder=True, **shape)
    BertModel(config).save_pretrained(tmp_path)
    for same, gradients, weights, _ in on_ranks(2, lambda: updates_differ(tmp_path, kind=ValueModel)):
        assert (same, gradients, weights) == (True, [], [])


def reference_differs(folder: Path) -> list[list[str]]:
    trainer = Trainer(folder, offload=True)
    first, reference = trainer.weights(), ReferenceWeights(trainer.model)
    trainer.learn(range(1))
    moved = trainer.weights()
    with reference.in_place():
        inside = trainer.weights()
    return [differing(first, inside), differing(moved, trainer.weights())]


def test_a_reference_takes_the_place_of_weights_that_rest_on_the_host(
    folder: Path, on_ranks: OnRanks
) -> None:
    assert on_ranks(2, lambda: reference_differs(folder)) == [[[], []]] * 2


def saved(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint after two updates, and return the weights after four."""
    trainer = Trainer(folder, offload=True)
    line: Any = ListeningFront()
    trainer.learn(range(2))
    RankCheckpoints(trainer.model, line).snapshot(
        {"report": 1, "folder": str(target)}, trainer.optimizer, folder
    )
    trainer.learn(range(2, 4))
    assert line.done.wait(60), "the shards were not written within 60 s"
    assert line.error is None
    torch.distributed.barrier()
    return trainer.weights()


def resumed(folder: Path, target: Path, *, offload: bool) -> dict[str, torch.Tensor]:
    trainer = Trainer(folder, offload=offload)
    line: Any = ListeningFront()
    RankCheckpoints(trainer.model, line).load(target, trainer.optimizer)
    trainer.learn(range(2, 4))
    return trainer.weights()


def resumes_differ(folder: Path, target: Path) -> list[list[str]]:
    right = saved(folder, target)
    return [differing(right, resumed(folder, target, offload=offload)) for offload in (True, False)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_bit_by_bit_with_and_without(
    folder: Path, on_ranks: OnRanks, tmp_path: Path, ranks: int
) -> None:
    assert on_ranks(ranks, lambda: resumes_differ(folder, tmp_path)) == [[[], []]] * ranks
