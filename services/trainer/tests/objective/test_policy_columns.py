"""What happens to the rewards of an update before its advantages, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.config import PolicyConfig
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy_columns import outcomes_of


def test_a_reward_is_bounded_before_a_long_response_costs_anything() -> None:
    """A wild reward stays within its bounds, and the punishment of a wrong answer is not swallowed by them."""
    group = pb.TrainGroup(group_id="g", prompt_token_ids=to_tensor(np.zeros(2, np.int32)))
    lengths, rewards = [20, 22, 24, 3], [50.0, -1.0, -7.0, 0.5]
    for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        tokens = np.ones(length, np.int32)
        group.samples.add(
            sample_id=f"g/{number}",
            token_ids=to_tensor(tokens),
            logprobs=to_tensor(np.full(length, -1.0, np.float32)),
            reward=reward,
        )
    batch = UpdateBatch.read([group], ModelLimits(vocabulary=13, max_sequence_tokens=0), Version(0, 3))
    overlong = {"buffer_tokens": 4, "penalty": 2.0}
    policy = PolicyConfig.model_validate({"advantage": {"reward_clip": 1.0, "overlong": overlong}})
    outcomes, _ = outcomes_of(batch, policy, 24, np.ones(4, np.bool_), 0, None)
    # Within [-1, 1]; then 0 at 20 tokens, a half of the punishment at 22, all of it at 24.
    assert outcomes.rewards.tolist() == pytest.approx([1.0, -1.0 - 1.0, -1.0 - 2.0, 0.5])
