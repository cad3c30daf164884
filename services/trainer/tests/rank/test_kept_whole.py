"""Updates that keep weights and gradients whole between micro-batches are those that give them back every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from flotilla_core.config import BatchingConfig, OptimizerConfig
from flotilla_core.errors import Exhausted, UserCodeError
from flotilla_testing.listening_front import ListeningFront
from flotilla_testing.tiny_qwen3 import VOCABULARY
from flotilla_trainer.batch.packing import Layout, Sequences, pack
from flotilla_trainer.rank import update as update_module
from flotilla_trainer.rank.cut import RankMesh, gathered, local
from flotilla_trainer.rank.kept_whole import Kept
from flotilla_trainer.rank.objective import LossTerms, Objective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import Update, finish
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.objective import ObjectiveSettings
from flotilla_trainer.wire.settings import SessionSettings

RANKS = 2
CPU = torch.device("cpu")
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
SESSION = SessionSettings(
    ObjectiveSettings(), OptimizerConfig(epsilon=1e-3), BatchingConfig(), seed=0, total_updates=1
)


class Gathers(TorchDispatchMode):
    """Counts how often weights are gathered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


class Failing(Objective):
    """An objective with code of a user's that fails on the second micro-batch."""

    def __init__(self) -> None:
        super().__init__(SESSION.objective)
        self.calls = 0

    def on(self, *given: Any) -> LossTerms:
        self.calls += 1
        terms = super().on(*given)
        if self.calls == 2:
            raise UserCodeError("it fails", where="a test")
        return terms


def command(rank: int, ranks: int = RANKS) -> Frame:
    """Return several micro-batches for this rank."""
    random = np.random.default_rng(5)
    lengths = np.array([9, 7, 12, 5, 11, 8, 6, 10])
    ends = np.cumsum(lengths)
    scored = np.concatenate(
        [np.arange(end - length + 2, end) for end, length in zip(ends, lengths, strict=True)]
    )
    weights = random.normal(0, 1, len(scored)).astype(np.float32) / np.float32(len(scored))
    tokens = random.integers(0, VOCABULARY, int(lengths.sum())).astype(np.int32)
    batches = pack(Sequences(tokens, lengths, scored, {"weights": weights}), Layout(12, ranks, packed=True))[
        rank
    ]
    assert len(batches) > 2
    arrays: dict[str, Array] = {}
    for index, batch in enumerate(batches):
        arrays |= batch.arrays(index)
    return Frame("work", 0, {"idle": [batch.idle for batch in batches]}, arrays)


def outcome(folder: Path, dtype: torch.dtype, kept: Kept, *, fails: bool = False) -> dict[str, Any]:
    """Return the gradients of this rank's second update and the weights after it, and what was whole meanwhile."""
    update_module.kept_by = lambda model, needed: kept  # of this rank alone, which is a process of its own
    model = ShardedModel(folder, dtype, RankMesh.form("cpu"), CPU)
    model.load(folder)
    optimizer = PolicyOptimizer(model, SESSION.optimizer)
    given, gradients = command(dist.get_rank()), {}
    for number in range(2):
        if fails:
            with pytest.raises(UserCodeError):
                Update(model, SESSION, Failing(), ListeningFront()).accumulate(given, backward=True)
            optimizer.discard_gradients()
        update = Update(model, SESSION, Objective(SESSION.objective), ListeningFront())
        with Gathers() as gathers:
            update.accumulate(given, backward=True)
        if number:
            gradients = {name: gathered(p.grad).numpy().copy() for name, p in model.trainable().items()}
        _, skipped = finish(update, optimizer, 1e-2)
        assert not skipped
    # What an optimizer, a publisher or a checkpoint reads is a shard again.
    assert all(isinstance(p.data, dist.tensor.DTensor) for p in model.parameters())
    weights = {name: local(p.detach()).numpy().copy() for name, p in model.trainable().items()}
    return {"gradients": gradients, "weights": weights, "gathers": gathers.count}


CASES = {
    "weights": (Kept(weights=True), False),
    "both": (Kept(weights=True, gradients=True), False),
    "both, after an error": (Kept(weights=True, gradients=True), True),
}


@pytest.fixture(scope="module")
def found(folder: Path, on_ranks: OnRanks) -> list[dict[Any, dict[str, Any]]]:
    """The outcomes of each rank; the ranks are forked once for all cases."""

    def all_cases() -> dict[Any, dict[str, Any]]:
        return {
            (dtype, name): outcome(folder, dtype, kept, fails=fails)
            for dtype in (torch.float32, torch.bfloat16)
            for name, (kept, fails) in {"nothing": (Kept(), False), **CASES}.items()
        }

    return on_ranks(RANKS, all_cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_the_same_whatever_is_kept(
    found: list[dict[Any, dict[str, Any]]], dtype: torch.dtype, case: str
) -> None:
    # In bfloat16 the gradients of micro-batches are added in float32 before the ranks add theirs, not after.
    limit = 1e-5 if dtype is torch.float32 else 1e-4
    for each in found:
        right, kept = each[dtype, "nothing"], each[dtype, case]
        for kind in ("gradients", "weights"):
            for name, value in right[kind].items():
                np.testing.assert_allclose(kept[kind][name], value, rtol=limit, atol=limit, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_kept_weights_are_gathered_once_an_update(found: list[dict[Any, dict[str, Any]]], case: str) -> None:
    for each in found:
        assert 0 < each[torch.float32, case]["gathers"] < each[torch.float32, "nothing"]["gathers"]


def after_lack_of_memory(folder: Path, kept: Kept) -> tuple[str, bool]:
    """Return the refusal of an update that broke off in a backward pass, and whether the next one is as any other."""
    update_module.kept_by = lambda model, needed: kept
    model = ShardedModel(folder, torch.float32, RankMesh.form("cpu"), CPU)
    model.load(folder)
    optimizer = PolicyOptimizer(model, SESSION.optimizer)
    lacking = [True, True]

    def run_out(layer: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda gradient: fail() if lacking and lacking.pop() and not lacking else None)

    def fail() -> None:
        raise torch.OutOfMemoryError("out of memory: 8 GiB asked for\nand more")

    def gradients() -> dict[str, torch.Tensor]:
        update = Update(model, SESSION, Objective(SESSION.objective), ListeningFront())
        update.accumulate(command(0, 1), backward=True)
        found = {name: local(p.grad).clone() for name, p in model.trainable().items()}
        optimizer.discard_gradients()
        return found

    right = gradients()
    # The backward pass of the second micro-batch breaks off between two layers.
    hook = model.layers[0].register_forward_hook(run_out)
    with pytest.raises(Exhausted) as refused:
        gradients()
    hook.remove()
    optimizer.discard_gradients()
    again = gradients()
    return str(refused.value), all(torch.equal(again[name], value) for name, value in right.items())


@pytest.mark.parametrize("kept", [Kept(), Kept(weights=True, gradients=True)], ids=str)
def test_a_micro_batch_that_does_not_fit_is_refused_and_leaves_nothing_behind(
    folder: Path, on_ranks: OnRanks, kept: Kept
) -> None:
    ((refusal, same),) = on_ranks(1, lambda: after_lack_of_memory(folder, kept))
    assert "batching.tokens_per_microbatch" in refusal and "8 GiB asked for" in refusal
    assert "and more" not in refusal
    assert same
