"""Means and deviations of rewards, over groups, updates and runs, against plain Python."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from flotilla_algorithms import ADVANTAGES, Outcomes, RewardHistory, normalised_rewards

TOLERANCE = 1e-9
RNG = np.random.default_rng(7)
GROUPS = [[1.0, 0.0, 0.0, 1.0], [1.0], [0.25, 1.25, 0.25, 0.25, 1.25], [1.0, 1.0, 1.0], [0.0, 1.0]]
SIZES = [len(group) for group in GROUPS]
REWARDS = [reward for group in GROUPS for reward in group]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_the_running_baseline_is_that_of_all_rewards_so_far(normalize_std: bool) -> None:
    earlier = [list(RNG.normal(2, 3, n)) for n in (7, 1, 4)]
    history = RewardHistory()
    for part in earlier:
        history = history.after(part)
    given = Outcomes.of(REWARDS, SIZES, history=history)
    everything = [reward for part in [*earlier, REWARDS] for reward in part]
    scale = statistics.stdev(everything) + 1e-6 if normalize_std else 1.0
    expected = [(reward - statistics.fmean(everything)) / scale for reward in REWARDS]
    found = ADVANTAGES["grpo"](given, baseline="running", normalize_std=normalize_std)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_history_is_the_same_in_whatever_parts_it_grew() -> None:
    whole, parts = RewardHistory().after(REWARDS), RewardHistory()
    for group in GROUPS:
        parts = parts.after(group)
    assert parts.count == whole.count
    assert (parts.mean, parts.deviation) == pytest.approx((whole.mean, whole.deviation))
    assert RewardHistory().after([]) == RewardHistory()


@pytest.mark.parametrize("std", ["none", "group", "batch", "running"])
@pytest.mark.parametrize("mean", ["none", "group", "batch", "running"])
def test_rewards_are_normalised_by_what_is_kept_and_by_nothing_where_they_are_alike(
    mean: str, std: str
) -> None:
    kept = [i != 5 for i in range(len(REWARDS))]
    history = RewardHistory().after([3.0, 4.0]).after([r for r, k in zip(REWARDS, kept, strict=True) if k])
    everything = [3.0, 4.0] + [r for r, k in zip(REWARDS, kept, strict=True) if k]
    expected: list[float] = []
    group_of = [group for group, size in enumerate(SIZES) for _ in range(size)]
    for sample, reward in enumerate(REWARDS):
        parts = {
            "group": [r for o, r in enumerate(REWARDS) if kept[o] and group_of[o] == group_of[sample]],
            "batch": [r for o, r in enumerate(REWARDS) if kept[o]],
            "running": everything,
        }
        centre = statistics.fmean(parts[mean] or [reward]) if mean != "none" else 0.0
        spread = statistics.stdev(parts[std]) if std != "none" and len(parts[std]) > 1 else 0.0
        value = (reward - centre) / (spread + 1e-6 if spread else 1.0)
        expected.append(2.0 * max(-0.7, min(0.7, value)))
    found = normalised_rewards(
        np.array(REWARDS),
        np.array(SIZES),
        np.array(kept),
        mean=mean,
        std=std,
        clip=0.7,
        scale=2.0,
        history=history,
    )
    of_kept = np.array(kept)
    np.testing.assert_allclose(found[of_kept], np.array(expected)[of_kept], rtol=1e-9, atol=TOLERANCE)


@pytest.mark.parametrize("mean", ["group", "batch"])
def test_a_part_of_which_nothing_is_kept_has_no_mean_and_is_not_centred(mean: str) -> None:
    """A critic learns from samples that are left out, whichever of them comes first."""
    kept = np.array([mean == "group"] * 4 + [False] * 3)
    rewards = [1.0, 3.0, 5.0, 7.0, 2.0, 8.0, 5.0]
    settings: dict[str, Any] = {"mean": mean, "std": "none", "clip": None, "scale": 1.0}
    found = normalised_rewards(np.array(rewards), np.array([4, 3]), kept, history=RewardHistory(), **settings)
    centred = [reward - statistics.fmean(rewards[:4]) for reward in rewards[:4]]
    expected = [*(centred if mean == "group" else rewards[:4]), *rewards[4:]]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("reward", [0.1, 0.7, -1 / 3, 1e9 / 7])
def test_equal_rewards_of_a_run_have_no_deviation_to_divide_by(reward: float) -> None:
    """What rounding left of one was divided by: 0.1 became 100,000."""
    history = RewardHistory()
    for count in (3, 7, 1, 5):
        history = history.after([reward] * count)
    assert (history.mean, history.deviation) == (pytest.approx(reward), 0.0)
    rewards = np.full(5, reward)
    settings: dict[str, Any] = {"mean": "none", "std": "running", "clip": None, "scale": 1.0}
    found = normalised_rewards(rewards, np.array([5]), np.ones(5, np.bool_), history=history, **settings)
    assert found.tolist() == pytest.approx([reward] * 5)
