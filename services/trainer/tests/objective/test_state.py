"""An objective keeps its state from update to update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.wire.objective import ObjectiveSettings

VERSION = Version(0, 3)


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": name, **parameters}


def objective_of(**sections: Any) -> ObjectiveSettings:
    """Return the objective of a plain run, with some sections replaced."""
    usual: dict[str, Any] = {
        "loss": function("ppo", clip_low=0.2, clip_high=0.2),
        "advantage": function("grpo", baseline="group", normalize_std=True),
    }
    return ObjectiveSettings.from_wire(wire_objective("policy", usual | sections))


def graded_batch() -> UpdateBatch:
    """One prompt, four answers, each with a reward of its own."""
    tokens, logprobs = to_tensor(np.array([1, 2], np.int32)), to_tensor(np.array([-0.5, -1.0], np.float32))
    group = pb.TrainGroup(group_id="g", prompt_token_ids=tokens)
    for number in range(4):
        group.samples.add(sample_id=f"s{number}", token_ids=tokens, logprobs=logprobs, reward=float(number))
    return UpdateBatch.read([group], ModelLimits(10, 0), VERSION)


def test_the_rewards_of_an_update_are_remembered_once_its_step_was_made() -> None:
    running = function("grpo", baseline="running", normalize_std=False)
    asked = objective_of(advantage=running)
    front = PolicyObjective(asked)
    batch = graded_batch()
    first = front.sequences(batch, 0)[0].columns["advantages"]
    front.sequences(replace(batch, rewards=batch.rewards + 5.0), 0)
    assert front.state()["reward_history"]["count"] == 0
    front.sequences(batch, 0)
    front.adapt({}, samples=4)
    later = PolicyObjective(asked)
    later.restore(front.state())
    moved = replace(batch, rewards=batch.rewards + 5.0)
    again = [each.sequences(moved, 0)[0].columns["advantages"] for each in (front, later)]
    np.testing.assert_array_equal(*again)
    assert front.state()["reward_history"]["count"] == 4
    assert again[0].min() > first.min()
