"""A reward model's update on a small model: what the front tells of its pairs, and what is no pair is refused by name.

The model is a table with a reward for each token, so that the reward of an answer is that of its last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.pairs import equal_answers, lone_sample, make_pairs
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.packing import Layout, Sequences, pack
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.front.session_settings import session_settings
from flotilla_trainer.objective.pairs import after_answers
from flotilla_trainer.objective.session_objective import session_objective
from flotilla_trainer.wire.objective import ObjectiveSettings

VOCABULARY = 13
REWARDS = 1.5 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def objective_of(center: float = 0.0) -> ObjectiveSettings:
    return ObjectiveSettings.from_wire(wire_objective("reward_model", {"center_coefficient": center}))


def read(groups: list[pb.TrainGroup]) -> UpdateBatch:
    return UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), None)


def scores(sequences: Sequences) -> np.ndarray:
    """Return the model's value for each scored place, from the token before it."""
    return REWARDS.numpy()[sequences.tokens[sequences.scored - 1]].astype(np.float32)


def metrics_of(groups: list[pb.TrainGroup]) -> dict[str, float]:
    batch = read(groups)
    return session_objective(objective_of()).sequences(batch, 0, scores(after_answers(batch)))[1]


def test_every_token_is_fed_and_the_last_one_is_asked() -> None:
    batch = read(make_pairs(3, VOCABULARY))
    for packed in (False, True):
        (batches,) = pack(after_answers(batch), Layout(10_000, 1, packed))
        (micro,) = batches
        assert micro.sequence_tokens == len(batch.tokens)
        last = batch.tokens[np.cumsum(batch.pieces.lengths) - 1]
        in_order = np.empty_like(last)
        in_order[micro.places] = micro.tokens.flatten()[micro.positions]
        np.testing.assert_array_equal(in_order, last)


def test_metrics_say_how_far_the_chosen_answers_are_ahead() -> None:
    groups = make_pairs(4, VOCABULARY)
    metrics = metrics_of(groups)
    last = np.array([[int(from_tensor(s.token_ids)[-1]) for s in group.samples] for group in groups])
    rewards = REWARDS.numpy()[last]
    ahead = rewards[:, 0] - rewards[:, 1]
    assert metrics["preference/accuracy"] == np.mean((ahead > 0) + 0.5 * (ahead == 0))
    assert metrics["preference/margin"] == pytest.approx(ahead.mean())
    assert metrics["preference/chosen_reward"] == pytest.approx(rewards[:, 0].mean())
    assert metrics["preference/rejected_reward"] == pytest.approx(rewards[:, 1].mean())


def test_a_head_of_zeros_prefers_nothing() -> None:
    batch = read(make_pairs(3, VOCABULARY))
    _, metrics = session_objective(objective_of()).sequences(batch, 0, np.zeros(6, np.float32))
    assert (metrics["preference/accuracy"], metrics["preference/margin"]) == (0.5, 0.0)
    assert metrics["loss"] == pytest.approx(math.log(2))


def partial_mask(groups: list[pb.TrainGroup]) -> None:
    length = len(from_tensor(groups[1].samples[1].token_ids))
    groups[1].samples[1].mask.CopyFrom(to_tensor(np.arange(length) == 0))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lone_sample, "a pair has two samples, this group has 1"),
        (equal_answers, "both answers of a pair are the same"),
        (partial_mask, "cannot leave out a part of an answer"),
    ],
)
def test_what_is_no_pair_is_refused_by_its_sample(
    spoil: Callable[[list[pb.TrainGroup]], None], said: str
) -> None:
    groups = make_pairs(3, VOCABULARY)
    spoil(groups)
    with pytest.raises(InvalidRequest, match=said) as caught:
        metrics_of(groups)
    assert "'g1/" in str(caught.value)


def adapters(spec: session_pb2.SessionSpec) -> None:
    spec.lora.update({"rank": 4})


def several_steps(spec: session_pb2.SessionSpec) -> None:
    spec.optimizer.update({"steps_per_update": 2})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(adapters, "a reward model has no adapters"), (several_steps, "in one step an update")],
)
def test_a_session_that_cannot_be_is_refused(spoil: Callable[[Any], None], said: str) -> None:
    spec = session_pb2.SessionSpec(objective=wire_objective("reward_model", {}), total_updates=1)
    spoil(spec)
    with pytest.raises(InvalidRequest, match=said):
        session_settings(spec)


@pytest.mark.parametrize("center", [-1.0, 1e9])
def test_a_center_coefficient_out_of_range_is_refused(center: float) -> None:
    with pytest.raises(InvalidRequest, match=r"spec\.objective\.section\.center_coefficient"):
        objective_of(center)


def test_versions_of_the_tokens_are_nobodys_business() -> None:
    groups = make_pairs(2, VOCABULARY)
    span = groups[0].samples[0].version_spans.add(start=0, end=1)
    span.version.CopyFrom(Version(3, 5).to_proto())
    assert not session_objective(objective_of()).writes_samples
    assert not read(groups).staleness.any()
