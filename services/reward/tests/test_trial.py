from __future__ import annotations

from pathlib import Path

import pytest

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.config import IsolationConfig
from flotilla_reward.judges.judge import Judges
from flotilla_reward.trial import outcomes_of

LOOKS = """
def judge(completions, trainer_state=None, **_):
    return [float(trainer_state.max_steps) if trainer_state else -1.0 for _ in completions]
"""


@pytest.mark.parametrize(("total_steps", "expected"), [(None, -1), (0, 0), (7, 7)])
async def test_a_function_sees_the_steps_of_a_run_only_where_there_are_some(
    tmp_path: Path, total_steps: int | None, expected: float
) -> None:
    path = tmp_path / "looks.py"
    path.write_text(LOOKS)
    rewards = [pb.RewardSpec(reward=f"{path}:judge")]
    rewards[0].timeout.FromSeconds(20)
    items = [pb.ScoreItem(sample_id="s", response="4", step=0)]
    request = pb.ScoreRequest(rewards=rewards, items=items, total_steps=total_steps)
    found = await outcomes_of(request, IsolationConfig(unsafe=True), Judges({}))
    assert found.outcomes[0].value.components[0].value == expected, found
