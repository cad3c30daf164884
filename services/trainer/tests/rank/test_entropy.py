"""What entropy earns in the loss: its coefficient for every token, and nothing above its cap."""

from __future__ import annotations

import pytest
import torch

from flotilla_core.config import PolicyConfig
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.wire.objective import POLICY, ObjectiveSettings

ENTROPY = (0.5, 1.5, 2.5)
WEIGHTS = (0.2, 0.3, 0.5)


def loss_of(entropy: torch.Tensor, cap: float | None, coefficient: float = 0.1) -> torch.Tensor:
    """Return the loss of tokens without advantages, of which the entropy term alone is left."""
    policy = PolicyConfig(entropy_coefficient=coefficient, entropy_cap=cap)
    columns = {
        "weights": torch.tensor(WEIGHTS),
        "advantages": torch.zeros(3),
        "sequences": torch.tensor([0, 0, 1]),
        "rollout_logprobs": torch.full((3,), -1.0),
        "fresh": torch.ones(3),
    }
    return Objective(ObjectiveSettings(POLICY, policy))(torch.full((3,), -1.0), entropy, columns).loss


@pytest.mark.parametrize("cap", [None, 1.0, 2.0])
def test_entropy_earns_its_coefficient_up_to_the_cap(cap: float | None) -> None:
    entropy = torch.tensor(ENTROPY, requires_grad=True)
    loss = loss_of(entropy, cap)
    loss.backward()
    earned = [min(value, cap or value) for value in ENTROPY]
    expected = -0.1 * sum(weight * value for weight, value in zip(WEIGHTS, earned, strict=True))
    assert loss.item() == pytest.approx(expected)
    pushed = [
        -0.1 * weight * (cap is None or value < cap) for weight, value in zip(WEIGHTS, ENTROPY, strict=True)
    ]
    assert entropy.grad is not None and entropy.grad.tolist() == pytest.approx(pushed)


def test_a_cap_without_anything_to_earn_is_refused() -> None:
    with pytest.raises(ValueError, match="entropy_coefficient is 0"):
        PolicyConfig(entropy_cap=1.0)
