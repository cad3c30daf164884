"""What is said of a batch before anybody learns from it: by whom a run needs, in the column that it belongs to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.gangs import group_messages
from flotilla_coordinator.gangs.frozen_role import FrozenRole
from flotilla_coordinator.gangs.gang_session import Gang
from flotilla_coordinator.gangs.policy import PolicyTrainer
from flotilla_coordinator.gangs.session_spec import critic_needs_start, frozen_roles_of
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.scoring import Scorer
from flotilla_core import rpc
from flotilla_core.config import RunConfig
from flotilla_core.roles import POLICY, REFERENCE, TEACHER
from flotilla_core.tensors import from_tensor, to_tensor


def a_batch(count: int = 5) -> Batch:
    tokens = np.arange(3, dtype=np.int32)
    groups = [
        RolloutGroup(f"run/{i}", "prompt", tokens, [RolloutSample(f"run/{i}/0", tokens + i, None, "text")])
        for i in range(count)
    ]
    return Batch(0, groups, {})


async def nobody() -> list[str]:
    return []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[pb.ComputeLogprobsRequest]:
    """What the gang was asked; it says -id of every token, in another order than it was asked in."""
    monkeypatch.setattr(rpc, "unary", lambda method, request, **options: method(request))
    monkeypatch.setattr(group_messages, "PART_BYTES", 30)
    return []


def gang(role: str, asked: list[pb.ComputeLogprobsRequest]) -> Gang:
    async def compute(request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        asked.append(request)
        reply = pb.ComputeLogprobsResponse()
        for sequence in reversed(request.sequences):
            numbers = -from_tensor(sequence.token_ids).astype(np.float32)
            reply.sequences.add(sequence_id=sequence.sequence_id, logprobs=to_tensor(numbers))
        return reply

    stub: Any = SimpleNamespace(ComputeLogprobs=compute)
    return Gang(role, stub, f"{role}-1", 1.0, role)


@pytest.mark.parametrize(
    ("role", "column"), [(REFERENCE, "reference_logprobs"), (TEACHER, "teacher_logprobs")]
)
async def test_a_frozen_gang_fills_its_own_column_however_many_calls_that_takes(
    role: str, column: str, asked: list[pb.ComputeLogprobsRequest]
) -> None:
    session = FrozenRole("run", session_pb2.SessionSpec(), gang(role, asked), nobody, 0, temperature=0.5)
    batch = a_batch()
    await session.score(batch)
    assert len(asked) > 1 and {request.temperature for request in asked} == {0.5}
    message = pb.TrainGroup()
    group_messages.fill(message, batch.groups[3])
    np.testing.assert_array_equal(from_tensor(getattr(message.samples[0], column)), [-3.0, -4.0, -5.0])
    others = {"values", "reference_logprobs", "teacher_logprobs"} - {column}
    assert not any(message.samples[0].HasField(other) for other in others)


async def test_no_call_outgrows_a_message_however_often_a_long_prompt_stands_in_it(
    asked: list[pb.ComputeLogprobsRequest],
) -> None:
    prompt, token = np.arange(100, dtype=np.int32), np.array([7], np.int32)
    samples = [RolloutSample(f"run/0/{i}", token, None, "text") for i in range(8)]
    batch = Batch(0, [RolloutGroup("run/0", "prompt", prompt, samples)], {})
    session = FrozenRole("run", session_pb2.SessionSpec(), gang(TEACHER, asked), nobody, 0, temperature=1.0)
    await session.score(batch)
    assert [len(request.sequences) for request in asked] == [1] * 8
    assert all(sample.teacher_logprobs is not None for sample in batch.samples)


async def test_the_copy_of_the_policys_ranks_speaks_as_the_first_policy(
    asked: list[pb.ComputeLogprobsRequest],
) -> None:
    session = PolicyTrainer("run", session_pb2.SessionSpec(), gang(POLICY, asked), nobody)
    batch = a_batch()
    await session.score_by_start(batch, temperature=1.0)
    assert all(request.reference for request in asked)
    np.testing.assert_array_equal(batch.samples[4].reference_logprobs, [-4.0, -5.0, -6.0])


@pytest.mark.parametrize(
    ("algorithm", "roles", "needs_start"),
    [
        ({"type": "grpo"}, [], False),
        ({"type": "grpo", "kl": {"placement": "loss"}}, [], False),
        ({"type": "grpo", "kl": {"placement": "loss", "reference": "service"}}, [REFERENCE], False),
        ({"type": "ppo"}, [], False),
        ({"type": "ppo", "kl": {"placement": "loss"}}, [], False),
        ({"type": "ppo", "kl": {"placement": "reward"}}, [], True),
        ({"type": "ppo", "kl": {"placement": "reward", "reference": "service"}}, [REFERENCE], False),
        ({"type": "distillation"}, [TEACHER], False),
        ({"type": "sft"}, [], False),
    ],
    ids=str,
)
def test_a_run_asks_those_whom_its_algorithm_needs(
    algorithm: dict[str, Any], roles: list[str], needs_start: bool, tmp_path: Path
) -> None:
    config = RunConfig.model_validate(
        {
            "name": "run",
            "steps": 1,
            "data": {"train": tmp_path / "train.jsonl"},
            "rewards": [{"reward": "exact"}],
            "algorithm": algorithm,
        }
    )
    assert frozen_roles_of(config) == roles
    assert critic_needs_start(config) == needs_start


async def test_samples_of_a_run_without_rewards_are_worth_nothing_and_nobody_is_asked() -> None:
    pool: Any = None
    item: Any = SimpleNamespace(sample_id="a")
    outcomes = await Scorer("run", (), pool, 1.0).score([item])
    assert outcomes["a"].total == 0.0
