"""What a critic learns: the returns of its samples, and what it cannot learn is refused by its field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.objective.value import ValueUpdate
from flotilla_trainer.wire.objective import POLICY, ObjectiveSettings

VOCABULARY = 13
TOLERANCE = 1e-6
GAMMA, LAM, CLIP = 0.97, 0.8, 0.3
SHAPED = {
    "advantage": {"reward_clip": 0.8, "overlong": {"buffer_tokens": 6, "penalty": 0.5}},
    "kl": {
        "placement": "reward",
        "estimator": "k1",
        "coefficient": 0.1,
    },
    "shuffle_rewards": True,
}


def wire_objective_of(clip: float | None = CLIP, **changes: Any) -> session_pb2.Objective:
    advantage = {"type": "gae", "gamma": GAMMA, "lam": LAM} | changes.pop("advantage", {})
    section = {"advantage": advantage, "critic": {"value_clip": clip}, **changes}
    return wire_objective("value", section, max_response_tokens=12)


def objective_of(clip: float | None = CLIP, **changes: Any) -> ObjectiveSettings:
    return ObjectiveSettings.from_wire(wire_objective_of(clip, **changes))


def make_groups(sizes: list[int]) -> list[pb.TrainGroup]:
    """Unequal lengths, tool results in the midst of some responses, a sample of context alone."""
    rng, extra, groups = np.random.default_rng(0), np.random.default_rng(1), []
    for index, size in enumerate(sizes):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6)).astype(np.int32)
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(prompt))
        for number in range(size):
            count = int(rng.integers(1, 12))
            sample = group.samples.add(sample_id=f"g{index}/{number}", reward=float(rng.normal()))
            sample.token_ids.CopyFrom(to_tensor(rng.integers(0, VOCABULARY, count).astype(np.int32)))
            for name in ("values", "logprobs", "reference_logprobs"):
                getattr(sample, name).CopyFrom(to_tensor(rng.normal(-0.5, 0.4, count).astype(np.float32)))
            sample.value_after = float(extra.normal())
            sample.truncated = number % 2 == 0
            if number == 1:
                sample.mask.CopyFrom(to_tensor(np.arange(count) % 3 > 0))
        groups.append(group)
    return groups


def own_tokens(sample: pb.TrainSample) -> np.ndarray:
    count = len(from_tensor(sample.token_ids))
    return from_tensor(sample.mask) if sample.mask.data else np.ones(count, bool)


def plain_returns(sample: pb.TrainSample, bootstrap: bool = True) -> list[float]:
    """Return the returns of the trained tokens by the formula of the estimator, as sums over later tokens."""
    own = own_tokens(sample)
    values = from_tensor(sample.values).astype(np.float64)[own]
    following = np.append(values[1:], sample.value_after if bootstrap and sample.truncated else 0.0)
    gains = np.zeros(len(values))
    gains[-1:] = sample.reward
    errors = gains + GAMMA * following - values
    return [
        values[t] + sum((GAMMA * LAM) ** (later - t) * errors[later] for later in range(t, len(values)))
        for t in range(len(values))
    ]


@pytest.mark.parametrize("bootstrap", [True, False])
def test_a_response_that_was_cut_off_returns_what_was_still_expected_unless_told_otherwise(
    bootstrap: bool,
) -> None:
    groups = make_groups([3, 2])
    objective = objective_of(advantage={"bootstrap_truncated": bootstrap})
    if not bootstrap:
        for sample in (sample for group in groups for sample in group.samples):
            sample.ClearField("value_after")
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), Version(0, 0))
    found = ValueUpdate(objective).sequences(batch, 0)[0].columns["returns"]
    expected = [x for g in groups for sample in g.samples for x in plain_returns(sample, bootstrap)]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("changes", [{}, SHAPED], ids=["plain", "shaped"])
def test_returns_are_the_advantages_of_the_policy_upon_the_values(changes: dict[str, Any]) -> None:
    objective = objective_of(**changes)
    batch = UpdateBatch.read(make_groups([3, 2, 4]), ModelLimits(VOCABULARY, 0), Version(0, 0))
    policy = PolicyObjective(replace(objective, kind=POLICY))
    critic, facts = ValueUpdate(objective).sequences(batch, 5)
    advantages = policy.sequences(batch, 5)[0].columns["advantages"]
    assert np.abs(advantages).max() > 0.1
    np.testing.assert_allclose(
        critic.columns["returns"], critic.columns["old_values"] + advantages, atol=TOLERANCE
    )
    assert facts["return_mean"] == pytest.approx(critic.columns["returns"].mean(), abs=TOLERANCE)


def test_values_that_foretell_the_returns_explain_all_of_their_spread() -> None:
    groups = make_groups([3, 2])
    for sample in (sample for group in groups for sample in group.samples):
        sample.mask.CopyFrom(to_tensor(np.arange(len(from_tensor(sample.token_ids))) == 0))
        sample.truncated = False
        sample.values.CopyFrom(to_tensor(np.full(len(own_tokens(sample)), sample.reward, np.float32)))
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), Version(0, 0))
    _, facts = ValueUpdate(objective_of()).sequences(batch, 0)
    assert facts["explained_variance"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("column", "changes"),
    [("values", {}), ("value_after", {}), ("reference_logprobs", SHAPED), ("logprobs", SHAPED)],
)
def test_samples_without_what_a_return_is_made_of_are_refused(column: str, changes: dict[str, Any]) -> None:
    groups = make_groups([2, 1])
    for sample in (sample for group in groups for sample in group.samples):
        sample.ClearField(column)
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), Version(0, 0))
    with pytest.raises(InvalidRequest, match=f"sample 'g0/0'.*`{column}` is empty"):
        ValueUpdate(objective_of(**changes)).sequences(batch, 0)


def test_advantages_that_are_sent_stand_for_no_value_of_a_critic() -> None:
    groups = make_groups([2, 1])
    for sample in (sample for group in groups for sample in group.samples):
        sample.advantages.CopyFrom(sample.values)
        sample.ClearField("values")
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), Version(0, 0))
    with pytest.raises(InvalidRequest, match=r"sample 'g0/0'.*`values` is empty"):
        ValueUpdate(objective_of()).sequences(batch, 0)


BY_OTHER_ADVANTAGES = {"advantage": {"type": "grpo"}, "critic": None}
CLIPPED_TO_NOTHING = {"critic": {"value_clip": 0.0}}
ADAPTING = {"kl": {"placement": "reward", "target": 0.1, "horizon_samples": 10}}


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        (BY_OTHER_ADVANTAGES, r"section\.critic"),
        (CLIPPED_TO_NOTHING, r"section\.critic\.value_clip"),
        (ADAPTING, r"section.*kl\.target"),
    ],
)
def test_what_a_critic_cannot_learn_is_refused_by_its_field(spoiled: dict[str, Any], named: str) -> None:
    section = {"advantage": {"type": "gae"}, "critic": {}} | spoiled
    with pytest.raises(InvalidRequest, match=rf"spec\.objective\.{named}"):
        ObjectiveSettings.from_wire(wire_objective("value", section))
