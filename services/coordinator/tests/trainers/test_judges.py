"""Each model that a run needs scores a batch before it is trained, in the column of that model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.scoring import RewardServiceScorer, Scorer
from flotilla_coordinator.trainers import messages as group_messages
from flotilla_coordinator.trainers.roles import PolicyTrainer, ScoringSession, Teachers, mean_logprobs
from flotilla_coordinator.trainers.session import Gang
from flotilla_coordinator.trainers.spec import critic_needs_start, frozen_roles_of
from flotilla_core.config import RunConfig
from flotilla_core.config.advantages import DistillAdvantage
from flotilla_core.roles import POLICY, REFERENCE, TEACHER
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_testing.files import NO_FILES, to_nobody


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
def asked(direct_calls: None, monkeypatch: pytest.MonkeyPatch) -> list[pb.ComputeLogprobsRequest]:
    """Record the requests; answer -id for every token, in another order than that of the request."""
    monkeypatch.setattr(group_messages, "PART_BYTES", 30)
    return []


def gang(role: str, asked: list[pb.ComputeLogprobsRequest], times: float = 1.0) -> Gang:
    async def compute(request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        asked.append(request)
        reply = pb.ComputeLogprobsResponse()
        for sequence in reversed(request.sequences):
            numbers = -from_tensor(sequence.token_ids).astype(np.float32) * np.float32(times)
            said = reply.sequences.add(sequence_id=sequence.sequence_id, logprobs=to_tensor(numbers))
            if request.top_k:
                top = np.repeat(from_tensor(sequence.token_ids)[:, None], request.top_k, 1)
                said.top_token_ids.CopyFrom(to_tensor(top + np.arange(request.top_k, dtype=np.int32)))
                said.top_logprobs.CopyFrom(to_tensor(-top.astype(np.float32)))
        return reply

    stub: Any = SimpleNamespace(ComputeLogprobs=compute)
    return Gang(role, stub, f"{role}-1", 1.0, role, NO_FILES, None, to_nobody)


@pytest.mark.parametrize(
    ("role", "column"), [(REFERENCE, "reference_logprobs"), (TEACHER, "teacher_logprobs")]
)
async def test_a_frozen_gang_fills_its_own_column_however_many_calls_that_takes(
    role: str, column: str, asked: list[pb.ComputeLogprobsRequest]
) -> None:
    session = ScoringSession("run", session_pb2.SessionSpec(), gang(role, asked), nobody, 0, temperature=0.5)
    batch = a_batch()
    await session.score(batch)
    assert len(asked) > 1 and {request.temperature for request in asked} == {0.5}
    message = pb.TrainGroup()
    group_messages.fill(message, batch.groups[3])
    np.testing.assert_array_equal(from_tensor(getattr(message.samples[0], column)), [-3.0, -4.0, -5.0])
    others = {"values", "reference_logprobs", "teacher_logprobs"} - {column}
    assert not any(message.samples[0].HasField(other) for other in others)


def teachers_of(
    advantage: dict[str, Any], asked: dict[str, list[pb.ComputeLogprobsRequest]], **said: float
) -> Teachers:
    """Teachers that say so many times -id of every token, each with its own list of what it was asked."""
    section = DistillAdvantage.model_validate(advantage)
    gangs = [gang(f"teacher-{name}", asked.setdefault(name, []), times) for name, times in said.items()]
    spec = session_pb2.SessionSpec()
    return Teachers(section, [ScoringSession("run", spec, one, nobody, 0, temperature=1.0) for one in gangs])


async def test_several_teachers_say_the_weighted_mean_of_what_each_of_them_says(
    asked: list[pb.ComputeLogprobsRequest],
) -> None:
    by_name: dict[str, list[pb.ComputeLogprobsRequest]] = {}
    teachers = teachers_of({"teachers": {"math": 7, "code": 3}}, by_name, math=1 / 3, code=1.1)
    batch = a_batch()
    await teachers.score(batch)
    for sample in batch.samples:
        said = [
            -0.7 * float(np.float32(token * np.float32(1 / 3)))
            - 0.3 * float(np.float32(token * np.float32(1.1)))
            for token in sample.token_ids.tolist()
        ]
        assert sample.teacher_logprobs is not None and sample.teacher_logprobs.dtype == np.float32
        # Rounded once, from float64.
        np.testing.assert_array_equal(sample.teacher_logprobs, np.array(said).astype(np.float32))
    asked_for = {name: [s.sequence_id for r in calls for s in r.sequences] for name, calls in by_name.items()}
    assert asked_for["math"] == asked_for["code"] == [sample.sample_id for sample in batch.samples]
    assert {"time/teacher_math_s", "time/teacher_code_s"} == batch.metrics.keys()


async def test_a_teacher_is_asked_about_the_samples_of_its_own_prompts_alone(
    asked: list[pb.ComputeLogprobsRequest],
) -> None:
    by_name: dict[str, list[pb.ComputeLogprobsRequest]] = {}
    advantage = {"teachers": {"math": 1, "code": 1, "law": 1}, "teacher_field": "domain"}
    teachers = teachers_of(advantage, by_name, math=1.0, code=2.0, law=3.0)
    batch = a_batch()
    for group, name in zip(batch.groups, ("math", "code", "code", "math", "code"), strict=True):
        group.teacher = f"teacher-{name}"
    await teachers.score(batch)
    asked_for = {name: [s.sequence_id for r in calls for s in r.sequences] for name, calls in by_name.items()}
    assert asked_for == {
        "math": ["run/0/0", "run/3/0"],
        "code": ["run/1/0", "run/2/0", "run/4/0"],
        "law": [],
    }
    np.testing.assert_array_equal(batch.samples[3].teacher_logprobs, [-3.0, -4.0, -5.0])
    np.testing.assert_array_equal(batch.samples[4].teacher_logprobs, [-8.0, -10.0, -12.0])
    assert {"time/teacher_math_s", "time/teacher_code_s"} == batch.metrics.keys()


async def test_teachers_are_asked_side_by_side(asked: list[pb.ComputeLogprobsRequest]) -> None:
    meeting = asyncio.Barrier(2)
    sessions = []
    for name in ("math", "code"):
        stub: Any = SimpleNamespace(ComputeLogprobs=waits_for_the_other(meeting))
        one = Gang(f"teacher-{name}", stub, f"{name}-1", 1.0, f"teacher-{name}", NO_FILES, None, to_nobody)
        sessions.append(ScoringSession("run", session_pb2.SessionSpec(), one, nobody, 0, temperature=1.0))
    section, batch = DistillAdvantage(teachers={"math": 1, "code": 1}), a_batch(1)
    async with asyncio.timeout(10):  # One after the other, the first would wait without end.
        await Teachers(section, sessions).score(batch)
    np.testing.assert_array_equal(batch.samples[0].teacher_logprobs, np.zeros(3))


def waits_for_the_other(meeting: asyncio.Barrier) -> Callable[[pb.ComputeLogprobsRequest], Any]:
    async def compute(request: pb.ComputeLogprobsRequest) -> pb.ComputeLogprobsResponse:
        await meeting.wait()
        reply = pb.ComputeLogprobsResponse()
        for sequence in request.sequences:
            reply.sequences.add(sequence_id=sequence.sequence_id, logprobs=to_tensor(np.zeros(3, np.float32)))
        return reply

    return compute


def test_the_mean_of_teachers_leads_to_their_normalised_geometric_mean() -> None:
    rng = np.random.default_rng(7)
    policy, math, code = rng.normal(size=(3, 6))
    shares = {"teacher-math": 0.7, "teacher-code": 0.3}
    geometric = log_softmax(0.7 * log_softmax(math) + 0.3 * log_softmax(code))

    def divergence(logits: np.ndarray) -> float:
        now = log_softmax(logits)
        return float(np.sum(np.exp(now) * (now - geometric)))

    step = 1e-6
    descent = [
        (divergence(policy - step * unit) - divergence(policy + step * unit)) / (2 * step)
        for unit in np.eye(len(policy))
    ]
    now = log_softmax(policy)
    said = {"teacher-math": log_softmax(math), "teacher-code": log_softmax(code)}
    lead = mean_logprobs(said, shares) - now
    # Each token as often as the policy draws it, weighted by its advantage.
    expected = np.exp(now) * (lead - np.sum(np.exp(now) * lead))
    np.testing.assert_allclose(expected, descent, atol=1e-6)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.sum(np.exp(logits)))


async def test_no_call_outgrows_a_message_however_often_a_long_prompt_stands_in_it(
    asked: list[pb.ComputeLogprobsRequest],
) -> None:
    prompt, token = np.arange(100, dtype=np.int32), np.array([7], np.int32)
    samples = [RolloutSample(f"run/0/{i}", token, None, "text") for i in range(8)]
    batch = Batch(0, [RolloutGroup("run/0", "prompt", prompt, samples)], {})
    session = ScoringSession(
        "run", session_pb2.SessionSpec(), gang(TEACHER, asked), nobody, 0, temperature=1.0
    )
    await session.score(batch)
    assert [len(request.sequences) for request in asked] == [1] * 8
    assert all(sample.teacher_logprobs is not None for sample in batch.samples)


async def test_a_teacher_that_is_asked_for_them_also_says_which_tokens_it_finds_likeliest(
    asked: list[pb.ComputeLogprobsRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_messages, "PART_BYTES", 1000)
    # What is said of three tokens, and not of six.
    monkeypatch.setattr(group_messages, "PIECE_BYTES", 3 * 4 * 8)
    spec = session_pb2.SessionSpec()
    session = ScoringSession("run", spec, gang(TEACHER, asked), nobody, 0, temperature=0.5, top_k=4)
    batch = a_batch()
    await session.score(batch)
    assert [(request.top_k, request.temperature) for request in asked] == [(4, 0.5)] * 5
    message = pb.TrainGroup()
    group_messages.fill(message, batch.groups[3])
    (sample,) = message.samples
    ids = from_tensor(sample.teacher_top_token_ids)
    assert ids.tolist() == [[3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]
    assert from_tensor(sample.teacher_top_logprobs).tolist() == [[-3.0] * 4, [-4.0] * 4, [-5.0] * 4]
    np.testing.assert_array_equal(from_tensor(sample.teacher_logprobs), [-3.0, -4.0, -5.0])
    assert batch.samples[3].nbytes == 4 * 3 + 4 * 3 + 3 * 4 * 8


def test_a_group_that_no_message_holds_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_messages, "PART_BYTES", 40)
    monkeypatch.setattr(group_messages, "PIECE_BYTES", 60)
    (small,) = a_batch(1).groups
    tokens = small.prompt_token_ids
    samples = [RolloutSample(f"run/1/{i}", tokens + i, None, "text") for i in range(9)]
    large = RolloutGroup("run/1", "prompt", tokens, samples)
    messages = []
    for part in group_messages.parts([small, large]):
        messages.append(pb.TrainChunk())
        for group in part:
            group_messages.fill(messages[-1].groups.add(), group)
    sent = [[(g.group_id, len(g.samples), bool(g.prompt_token_ids.data)) for g in m.groups] for m in messages]
    assert sent == [
        [("run/0", 1, True), ("run/1", 4, True)],
        [("run/1", 5, False)],
    ]
    ids = [sample.sample_id for m in messages for g in m.groups for sample in g.samples]
    assert ids == ["run/0/0", *(f"run/1/{i}" for i in range(9))]


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
        (
            {
                "type": "distillation",
                "advantage": {"teachers": {"math": 1, "code": 1}},
                "kl": {"placement": "loss", "reference": "service"},
            },
            [REFERENCE, "teacher-math", "teacher-code"],
            False,
        ),
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
    outcomes = await Scorer(RewardServiceScorer("run", (), pool, 1.0)).score([item])
    assert outcomes["a"].total == 0.0
