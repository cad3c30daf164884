"""Ratios beyond what a float holds, and tokens of weight zero: neither spoils an update, whatever the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flotilla_algorithms import divergence as front_divergence
from flotilla_core.config import PolicyConfig
from flotilla_trainer.losses.divergence import divergence
from flotilla_trainer.losses.table import LOSSES
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.wire.objective import POLICY, ObjectiveSettings

SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 1, 1])
FAR = 1
"""The token that is far away, or that does not count."""
Columns = dict[str, torch.Tensor]


def objective(loss: str, **section: Any) -> Objective:
    """Of the ranks; the presets of a run would say more."""
    policy = PolicyConfig.model_validate({"loss": {"type": loss}, **section})
    return Objective(ObjectiveSettings(POLICY, policy))


def columns(advantage_sign: float = 1.0) -> Columns:
    rng = torch.Generator().manual_seed(3)
    count = len(SEQUENCES)
    return {
        "weights": 0.1 + torch.rand(count, generator=rng),
        "advantages": advantage_sign * torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5, -0.5]),
        "sequences": SEQUENCES,
        "rollout_logprobs": -1.0 - torch.rand(count, generator=rng),
        "fresh": torch.ones(count),
        "selected": torch.tensor([0, 1, 0, 1, 0, 0, 1]),
        "segments": torch.tensor([0, 0, 1, 2, 2, 3, 3]),
        "reference_logprobs": -1.5 * torch.ones(count),
    }


def logprobs_near(given: Columns) -> torch.Tensor:
    noise = 0.1 * torch.randn(len(SEQUENCES), generator=torch.Generator().manual_seed(4))
    return given["rollout_logprobs"] + noise


def gradient(applied: Objective, logprobs: torch.Tensor, given: Columns) -> tuple[torch.Tensor, torch.Tensor]:
    now = logprobs.clone().requires_grad_()
    loss = applied(now, torch.ones_like(now), given).loss
    loss.backward()
    assert now.grad is not None
    return loss.detach(), now.grad


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("distance", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_distance_between_two_policies_makes_a_loss_or_its_gradient_infinite(
    loss: str, distance: float, sign: float, weight: float
) -> None:
    given = columns(sign)
    given["weights"][FAR] = weight
    given["rollout_logprobs"][FAR] = -2.0 - max(distance, 0.0)
    logprobs = logprobs_near(given)
    logprobs[FAR] = given["rollout_logprobs"][FAR] + distance
    value, slopes = gradient(objective(loss), logprobs, given)
    assert value.isfinite() and slopes.isfinite().all()


@pytest.mark.parametrize("distance", [-1e4, -89.0, 89.0, 1e4])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_no_distance_from_the_reference_makes_a_divergence_infinite(estimator: str, distance: float) -> None:
    reference = torch.full((3,), -2.0)
    logprobs = (reference + distance).requires_grad_()
    value = divergence(estimator, logprobs, reference)
    value.sum().backward()
    assert logprobs.grad is not None
    assert value.isfinite().all() and logprobs.grad.isfinite().all()
    front = front_divergence(estimator, logprobs.detach().double().numpy(), reference.double().numpy())
    torch.testing.assert_close(torch.tensor(front), value.detach().double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("spoilt", [None, float("nan"), float("-inf")])
def test_a_token_of_weight_zero_is_as_good_as_absent(loss: str, spoilt: float | None) -> None:
    given = columns()
    given["weights"][FAR] = 0.0
    logprobs = logprobs_near(given)
    if spoilt is not None:
        logprobs[FAR] = spoilt
    value, slopes = gradient(objective(loss), logprobs, given)
    assert slopes[FAR] == 0
    rest = torch.arange(len(SEQUENCES)) != FAR
    expected, rest_slopes = gradient(
        objective(loss), logprobs[rest], {name: column[rest] for name, column in given.items()}
    )
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(slopes[rest], rest_slopes)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_token_that_a_correction_leaves_out_is_as_good_as_absent(loss: str) -> None:
    given = columns()
    given["proximal_logprobs"] = given["rollout_logprobs"] + 0.05
    given["proximal_logprobs"][FAR] += 3.0
    corrected = objective(
        loss,
        correction={
            "proximal": "trainer",
            "importance": "icepop",
            "importance_cap": 2.0,
            "importance_floor": 0.5,
        },
    )
    logprobs = logprobs_near(given)
    value, slopes = gradient(corrected, logprobs, given)
    assert slopes[FAR] == 0
    rest = torch.arange(len(SEQUENCES)) != FAR
    expected, rest_slopes = gradient(
        corrected, logprobs[rest], {name: column[rest] for name, column in given.items()}
    )
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(slopes[rest], rest_slopes)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_weight_of_a_token_scales_its_own_gradient_and_no_other(loss: str) -> None:
    given = columns()
    logprobs = logprobs_near(given)
    _, slopes = gradient(objective(loss), logprobs, given)
    halved = given | {"weights": given["weights"].clone()}
    halved["weights"][FAR] *= 0.5
    _, after = gradient(objective(loss), logprobs, halved)
    expected = slopes.clone()
    expected[FAR] *= 0.5
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("name", ["entropy", "kl", "sft"])
def test_what_counts_nowhere_spoils_neither_entropy_nor_divergence_nor_answers(name: str) -> None:
    given = columns() | {"kl_weights": torch.full((len(SEQUENCES),), 0.1)}
    given["weights"][FAR] = given["kl_weights"][FAR] = 0.0
    logprobs, entropy = logprobs_near(given), torch.ones(len(SEQUENCES))
    logprobs[FAR] = entropy[FAR] = float("-inf")
    applied = {
        "entropy": objective("ppo", kl={"placement": "loss"}, entropy_coefficient=0.1),
        "kl": objective("ppo", kl={"placement": "loss"}),
        "sft": Objective(ObjectiveSettings()),
    }[name]
    now, spread = logprobs.requires_grad_(), entropy.requires_grad_()
    loss = applied(now, spread, given).loss
    loss.backward()
    assert loss.isfinite() and now.grad is not None
    assert now.grad.isfinite().all() and now.grad[FAR] == 0
