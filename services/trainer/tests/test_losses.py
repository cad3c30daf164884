"""Losses against float64 references written out token by token."""

from __future__ import annotations

import math

import pytest
import torch

from flotilla_trainer.losses import grpo_loss, sft_loss


def reference_grpo(
    new: list[float], old: list[float], advantages: list[float], low: float, high: float
) -> tuple[float, int, float]:
    loss, clipped, ratios = 0.0, 0, 0.0
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp(n - o)
        plain, bounded = ratio * a, min(max(ratio, 1 - low), 1 + high) * a
        loss -= min(plain, bounded)
        clipped += bounded < plain
        ratios += ratio
    return loss, clipped, ratios


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0)])
def test_grpo_equals_the_formula(low: float, high: float) -> None:
    generator = torch.Generator().manual_seed(3)
    new = -3 * torch.rand(500, generator=generator, dtype=torch.float64)
    old = new + 0.4 * torch.randn(500, generator=generator, dtype=torch.float64)
    advantages = torch.randn(500, generator=generator, dtype=torch.float64)
    terms = grpo_loss(new.float(), old.float(), advantages.float(), low, high)
    loss, clipped, ratio = reference_grpo(new.tolist(), old.tolist(), advantages.tolist(), low, high)
    assert terms.loss.item() == pytest.approx(loss, rel=1e-5)
    assert terms.clipped.item() == pytest.approx(clipped, abs=2)  # ties fall either way in float32
    assert terms.ratio.item() == pytest.approx(ratio, rel=1e-5)


def test_on_policy_the_gradient_is_the_advantage() -> None:
    logprobs = torch.tensor([-0.5, -1.5, -2.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    grpo_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2).loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize(
    ("shift", "advantage", "flows"), [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, -1.0, False)]
)
def test_the_clip_stops_only_what_already_went_far_enough(
    shift: float, advantage: float, flows: bool
) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    grpo_loss(logprobs, logprobs.detach() - shift, torch.tensor([advantage]), 0.2, 0.2).loss.backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad.abs().item()) is flows


def test_sft_sums_the_negative_log_likelihood() -> None:
    logprobs = torch.tensor([-0.25, -1.0, -3.0])
    assert sft_loss(logprobs).loss.item() == pytest.approx(4.25)
