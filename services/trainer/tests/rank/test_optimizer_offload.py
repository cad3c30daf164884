"""Moments that live on the host give the steps that resident ones give."""

from __future__ import annotations

import pytest
import torch

from flotilla_trainer.rank import optimizer
from flotilla_trainer.rank.optimizer import OptimizerOffload

SHAPES = [(4, 3), (5,), (2, 2), (), (7, 1)]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def adamw(group: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(group, lr=0.1, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("part_elements", [1, 12, 1000])
def test_steps_in_parts_are_the_steps_of_all_at_once(
    part_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PART_ELEMENTS", part_elements)
    resident, visiting = parameters(), parameters()
    whole, parts = adamw(resident), adamw(visiting)
    steps = OptimizerOffload(parts, visiting)
    for step in range(4):
        for index, (left, right) in enumerate(zip(resident, visiting, strict=True)):
            # One parameter gets no gradient in the first steps, as experts that nothing is routed to.
            gradient = None if index == 2 and step < 2 else torch.randn(left.shape)
            left.grad, right.grad = gradient, None if gradient is None else gradient.clone()
        whole.step()
        steps.step()
        assert all(parameter.grad is None for parameter in visiting)
    for left, right in zip(resident, visiting, strict=True):
        assert torch.equal(left, right)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole.state[left][name], parts.state[right][name])
