"""Ranks whose GPUs a sleeping generator shares give back what they do not use, before it is told that they are done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flotilla_core.config import StackConfig
from flotilla_core.errors import Exhausted
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.rank.worker import RankWorker
from flotilla_trainer.wire.frames import Frame


def worker(did: list[str], *, returns: bool, device: str = "cuda") -> Any:
    """A rank that knows one command that succeeds and one that fails."""

    def refuse(_: Frame) -> Any:
        did.append("refused")
        raise Exhausted("a micro-batch does not fit")

    rank = RankWorker.__new__(RankWorker)
    known: Any = {"train": lambda _: did.append("trained"), "score": refuse}
    setup: Any = SimpleNamespace(returns_memory=returns)
    rank._commands, rank._setup, rank._device = known, setup, torch.device(device)
    return rank


@pytest.mark.parametrize(("returns", "device"), [(True, "cuda"), (True, "cpu"), (False, "cuda")])
def test_memory_is_returned_before_the_answer_also_to_a_command_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, returns: bool, device: str
) -> None:
    did: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("returned"))
    rank = worker(did, returns=returns, device=device)
    rank.run(Frame("train", {}, {}))
    with pytest.raises(Exhausted):
        rank.run(Frame("score", {}, {}))
    returned = ["returned"] * (returns and device == "cuda")
    assert did == ["trained", *returned, "refused", *returned]


def test_only_the_gang_of_the_policy_shares_gpus_with_generators(tmp_path: Path) -> None:
    def plan(name: str, *, asleep: bool) -> GangPlan:
        described = {"placement": "colocated", "generator": {"sleep_while_training": asleep}}
        return GangPlan.of_stack(StackConfig.model_validate(described), name, f"{name}-1", tmp_path, tmp_path)

    assert plan("trainer", asleep=True).returns_memory
    assert not plan("trainer", asleep=False).returns_memory and not plan("critic", asleep=True).returns_memory


def test_gangs_that_share_gpus_return_what_they_do_not_use(tmp_path: Path) -> None:
    critic = {"replicas": 1, "placement": "colocated"}
    stack = StackConfig.model_validate({"critic": critic, "reference": {"replicas": 1}})
    plans = [
        GangPlan.of_stack(stack, name, "1", tmp_path, tmp_path) for name in ("trainer", "critic", "reference")
    ]
    assert [plan.returns_memory for plan in plans] == [True, True, False]
