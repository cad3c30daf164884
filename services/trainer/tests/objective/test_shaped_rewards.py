"""The front leaves out groups of an update and normalises its rewards as the settings say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.wire.objective import ObjectiveSettings

GROUP = "group"
BATCH = "batch"
RUNNING = "running"


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": name, **parameters}


def front_of(
    advantage: dict[str, Any], weights: dict[str, Any] | None = None, **keys: Any
) -> PolicyObjective:
    """Return the objective of a run with the loss `ppo` and this advantage."""
    section = {"advantage": advantage | keys, "sample_weights": weights or {}}
    return PolicyObjective(
        ObjectiveSettings.from_wire(wire_objective("policy", section, max_response_tokens=8))
    )


def batch_of(rewards: list[list[float]], cut_off: tuple[str, ...] = ()) -> UpdateBatch:
    """One prompt for each list of rewards; the answers are one to three tokens long."""
    groups = []
    for index, of_group in enumerate(rewards):
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(np.array([1, 2], np.int32)))
        for number, reward in enumerate(of_group):
            length, name = 1 + (index + number) % 3, f"g{index}/{number}"
            group.samples.add(
                sample_id=name,
                token_ids=to_tensor(np.arange(length, dtype=np.int32)),
                logprobs=to_tensor(np.full(length, -1.0, np.float32)),
                reward=reward,
                truncated=name in cut_off,
            )
        groups.append(group)
    return UpdateBatch.read(groups, ModelLimits(9, 0), Version(0, 0))


def by_sample(front: PolicyObjective, batch: UpdateBatch, column: str) -> list[float]:
    """Return the number of each sample in a column; all of its tokens have the same number."""
    columns = front.sequences(batch, 0)[0].columns
    found = {}
    for sample, value in zip(columns["sequences"].astype(int).tolist(), columns[column], strict=True):
        assert found.setdefault(sample, value) == value
    return [float(found[sample]) for sample in sorted(found)]


def test_a_group_is_judged_by_what_is_left_of_it() -> None:
    batch = batch_of([[1.0, 1.0, 0.0], [1.0, 0.0]], cut_off=("g0/2",))
    front = front_of(
        function("grpo", baseline="group", normalize_std=True), drop_truncated=True, drop_uniform_groups=True
    )
    assert np.flatnonzero(by_sample(front, batch, "weights")).tolist() == [3, 4]


def test_running_normalisation_is_by_the_rewards_of_the_updates_that_were_made() -> None:
    front = front_of(function("reinforce", gamma=1.0), reward_normalization={"mean": RUNNING, "std": RUNNING})
    batch = batch_of([[1.0, 0.0, 1.0], [0.0, 0.25]])
    later = replace(batch, rewards=batch.rewards + 2.0)
    front.sequences(replace(batch, rewards=batch.rewards + 50.0), 0)  # An update that is not made.
    front.sequences(batch, 0)
    front.adapt({}, samples=5)
    seen = [*batch.rewards, *later.rewards]
    expected = (later.rewards - np.mean(seen)) / (np.std(seen, ddof=1) + 1e-6)
    np.testing.assert_allclose(by_sample(front, later, "advantages"), expected, rtol=1e-5)


GRPO = function("grpo", baseline="group", normalize_std=True)


def test_a_sample_counts_by_its_reward_its_group_and_its_length() -> None:
    weights = {
        "by_reward": "max_min",
        "by_difficulty": {"easiest": 0.5, "hardest": 2.0},
        "by_length": {"shortest": 1.5, "longest": 0.5},
    }
    batch = batch_of([[1.0, 0.5, 0.0, 0.0], [1.0, 1.0]], cut_off=("g1/1",))
    front = front_of(GRPO, weights, drop_truncated=True)
    lengths = [1, 2, 3, 1, 2]
    by_length = [1.5 - (n - 1) / 2 for n in lengths]
    by_reward = [2.0, 0.0, 1.0, 1.0, 1.0]
    by_difficulty = [2.0 - 1.5 * 0.375] * 4 + [0.5]
    shares = np.prod([by_length, by_reward, by_difficulty], axis=0)
    expected = [*(shares / (shares @ lengths)), 0.0]
    np.testing.assert_allclose(by_sample(front, batch, "weights"), expected, rtol=1e-6)
    assert front.units(batch) == pytest.approx(shares @ lengths)
    assert front.sequences(batch, 0)[1]["tokens/counted_share"] == pytest.approx(7 / 12)


@pytest.mark.parametrize("parts", [((0, 1), (2,)), ((0,), (1,), (2,))])
def test_the_powers_of_rewards_make_the_same_update_of_parts_as_of_the_whole(
    parts: tuple[tuple[int, ...], ...],
) -> None:
    weights = {"by_reward": "pow", "power": 1.5}
    rewards = [[1.0, 0.5, 0.0], [2.0, 1.0], [0.25, 4.0, 1.0]]
    front = front_of(GRPO, weights)

    def loss(batch: UpdateBatch) -> float:
        columns = front.sequences(batch, 0)[0].columns
        return float(columns["weights"].astype(float) @ columns["advantages"])

    whole = batch_of(rewards)
    # Lengths follow from the number of a group: the others stay in their places with rewards that weigh nothing.
    cut = [
        batch_of([group if i in part else [0.0] * len(group) for i, group in enumerate(rewards)])
        for part in parts
    ]
    total = sum(front.units(part) * loss(part) for part in cut)
    assert total / sum(front.units(part) for part in cut) == pytest.approx(loss(whole), rel=1e-5)


def test_an_update_whose_samples_all_weigh_nothing_trains_nothing() -> None:
    front = front_of(GRPO, {"by_reward": "pow"})
    batch = batch_of([[0.0, 0.0]])
    assert not front.sequences(batch, 0)[0].columns["weights"].any()
    assert front.units(batch) == 0.0
