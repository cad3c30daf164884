"""The learning rate as a function of the update's number."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flotilla_core.config import OptimizerConfig
from flotilla_trainer.front.session_progress import learning_rate


def rates(schedule: str, total: int = 20, warmup: int = 4, ratio: float = 0.1) -> list[float]:
    section = {"schedule": schedule, "warmup_updates": warmup, "final_lr_ratio": ratio}
    optimizer = OptimizerConfig.model_validate(section)
    return [learning_rate(optimizer, 2.0, total, update) for update in range(total + 5)]


def test_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    assert rates("constant")[:6] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_starts_at_the_peak_falls_and_rests_at_its_final_share(schedule: str) -> None:
    decay = rates(schedule)[4:]
    assert decay[0] == pytest.approx(2.0)
    assert all(later < earlier for earlier, later in pairwise(decay[:17]))
    assert decay[16:] == pytest.approx([0.2] * 5)


def test_half_way_down_linear_and_cosine_meet() -> None:
    assert rates("linear")[12] == pytest.approx(rates("cosine")[12]) == pytest.approx(1.1)


def test_a_run_shorter_than_its_warm_up_stays_defined() -> None:
    assert rates("linear", total=2, warmup=10)[:2] == pytest.approx([0.2, 0.4])
