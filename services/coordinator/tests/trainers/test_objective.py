"""A run's request to the trainer is its configuration; values that a section omits come from other sections."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla_coordinator.trainers.spec import objective
from flotilla_core.config import RunConfig
from flotilla_core.structs import to_json

REWARDS = [{"reward": "exact"}, {"reward": "format", "weight": 0.25, "parameters": {"pattern": ".*"}}]


def config(**algorithm: Any) -> RunConfig:
    data = {"train": "train.jsonl"}
    return RunConfig.model_validate(
        {"name": "asked", "steps": 3, "data": data, "rewards": REWARDS, "algorithm": algorithm}
    )


def test_gdpo_weighs_the_rewards_as_they_are_weighed_unless_it_is_told_otherwise() -> None:
    def weights(**advantage: Any) -> list[float]:
        section = to_json(objective(config(type="gdpo", advantage=advantage)).section)
        return list(section["advantage"]["weights"])

    assert weights() == [1.0, 0.25]
    assert weights(weights=[2, 3]) == [2.0, 3.0]


def test_remax_refuses_what_its_greedy_rewards_cannot_follow() -> None:
    with pytest.raises(ValueError, match=r"which advantage\.overlong does not punish"):
        config(type="remax", advantage={"overlong": {"buffer_tokens": 4}})
    with pytest.raises(ValueError, match="loop is client, which asks no greedy responses"):
        RunConfig.model_validate(config(type="remax").model_dump() | {"loop": "client"})


def test_a_loop_of_a_client_that_would_ask_a_teacher_is_told_which_key_asks_it() -> None:
    with pytest.raises(
        ValueError, match=r"asks no teacher: leave algorithm\.teacher out, or leave the steps to"
    ):
        RunConfig.model_validate(config(type="grpo", teacher={}).model_dump() | {"loop": "client"})
    with pytest.raises(
        ValueError, match="asks no teacher: send advantages of your own, or leave the steps to"
    ):
        RunConfig.model_validate(config(type="distillation").model_dump() | {"loop": "client"})


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"advantage": {"weights": [1.0]}}, "has 1 numbers, rewards has 2 terms"),
        (
            {"advantage": {"overlong": {"buffer_tokens": 4}}},
            "advantage.overlong and advantage.reward_normalization change their sum",
        ),
        ({"shuffle_rewards": True}, "shuffle_rewards and kl.placement reward"),
        ({"kl": {"placement": "reward", "coefficient": 0.1}}, "shuffle_rewards and kl.placement reward"),
    ],
)
def test_gdpo_refuses_what_acts_on_the_sum_of_rewards(algorithm: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(type="gdpo", **algorithm)
