"""Several optimizer steps of one update: whole groups, denominators of their own, ratios against the policy before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import as_struct, wire_objective
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import StepPlan, UpdateBatch, proximal_share
from flotilla_trainer.front.session_settings import session_settings
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.update import metrics_of_steps
from flotilla_trainer.wire.objective import ObjectiveSettings

VOCABULARY = 13
VERSION = Version(0, 3)


def objective_of(preset: str, **correction: Any) -> ObjectiveSettings:
    """Return the objective of a preset, with changes of its correction."""
    section = {"type": preset, "correction": correction}
    return ObjectiveSettings.from_wire(wire_objective("policy", section, max_response_tokens=12))


def make_groups(sizes: list[int]) -> list[pb.TrainGroup]:
    """Unequal lengths; half of each answer is one version old; the second group has equal rewards."""
    rng = np.random.default_rng(0)
    groups = []
    for index, size in enumerate(sizes):
        prompt = rng.integers(0, VOCABULARY, 3).astype(np.int32)
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(prompt))
        for number in range(size):
            response = rng.integers(0, VOCABULARY, rng.integers(2, 12)).astype(np.int32)
            sample = group.samples.add(
                sample_id=f"g{index}/{number}",
                token_ids=to_tensor(response),
                logprobs=to_tensor(rng.normal(-2.5, 0.4, len(response)).astype(np.float32)),
                reward=1.0 if index == 1 else float(number == 0),
            )
            span = sample.version_spans.add(start=0, end=len(response) // 2)
            span.version.CopyFrom(Version(0, 2).to_proto())
        groups.append(group)
    return groups


def batch_of(sizes: list[int]) -> UpdateBatch:
    return UpdateBatch.read(make_groups(sizes), ModelLimits(VOCABULARY, 0), VERSION)


def steps_of(preset: str, sizes: list[int], plan: StepPlan, **correction: Any) -> list[Sequences]:
    batch = batch_of(sizes)
    whole, _ = PolicyObjective(objective_of(preset, **correction)).sequences(
        batch, 0, None, plan.parts(batch)
    )
    return plan.steps(whole, batch)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dr_grpo", "rloo"])
def test_each_step_is_what_an_update_of_its_groups_alone_would_be(preset: str) -> None:
    steps = steps_of(preset, [3, 2, 5, 2, 4], StepPlan(2))
    groups = make_groups([3, 2, 5, 2, 4])
    for step, part in zip(steps, (groups[:3], groups[3:]), strict=True):
        alone = UpdateBatch.read(part, ModelLimits(VOCABULARY, 0), VERSION)
        expected, _ = PolicyObjective(objective_of(preset)).sequences(alone, 0)
        np.testing.assert_array_equal(step.tokens, expected.tokens)
        np.testing.assert_array_equal(step.lengths, expected.lengths)
        np.testing.assert_array_equal(step.scored, expected.scored)
        for name in ("advantages", "weights", "rollout_logprobs"):
            np.testing.assert_allclose(step.columns[name], expected.columns[name], rtol=1e-6, err_msg=name)


def test_what_is_made_over_the_update_is_not_made_over_its_steps() -> None:
    preset = "reinforce_plus_plus"
    whole = steps_of(preset, [3, 4], StepPlan())[0].columns["advantages"]
    cut = [step.columns["advantages"] for step in steps_of(preset, [3, 4], StepPlan(2))]
    np.testing.assert_array_equal(np.concatenate(cut), whole)


@pytest.mark.parametrize(("groups", "asked", "made"), [(5, 2, 2), (3, 8, 3), (1, 4, 1), (8, 3, 3)])
def test_no_group_is_divided_or_forgotten_and_fewer_groups_are_fewer_steps(
    groups: int, asked: int, made: int
) -> None:
    sizes = [3 + index % 2 for index in range(groups)]
    batch, plan = batch_of(sizes), StepPlan(asked)
    steps = plan.steps(batch.sequences({"weights": batch.trained}), batch)
    assert len(steps) == made
    assert sum(len(step.lengths) for step in steps) == sum(sizes)
    parts = plan.parts(batch)
    assert (np.sum(parts, axis=0) == 1).all()


def test_passes_repeat_the_steps_and_steps_in_which_nothing_counts_are_none() -> None:
    # Group 1 of these samples has equal rewards: dapo leaves it out.
    steps = steps_of("dapo", [6, 4, 8], StepPlan(3, 2))
    assert len(steps) == 4
    np.testing.assert_array_equal(steps[0].tokens, steps[2].tokens)


def test_the_interpolated_policy_is_exact_at_the_start_and_where_the_rollout_is_the_policy() -> None:
    staleness = np.array([0, 1, 3], np.float32)
    np.testing.assert_array_equal(proximal_share(staleness, 0.0), [1, 1, 1])
    np.testing.assert_allclose(proximal_share(staleness, 0.5), [0, 1 / 1.5, 3 / 3.5], rtol=1e-6)
    steps = steps_of("grpo", [3, 4], StepPlan(2, 2), proximal="interpolated")
    assert (steps[0].columns["proximal_share"] == 1).all()
    assert "staleness" not in steps[0].columns
    stale = steps[1].columns["proximal_share"]
    assert set(np.unique(stale).round(6)) == {0.0, np.float32(1 / 1.25).round(6)}


@pytest.mark.parametrize("column", ["proximal_logprobs", "proximal_share"])
def test_the_ratio_and_its_correction_compare_with_the_policy_before_the_update(column: str) -> None:
    correction = {
        "proximal": "trainer" if column == "proximal_logprobs" else "interpolated",
        "importance": "token",
        "importance_cap": 5.0,
    }
    rank = Objective(objective_of("grpo", **correction))
    now, rollout = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.3, -1.9, -0.8])
    proximal = rollout + 0.25 * (now - rollout)
    columns = {
        "weights": torch.ones(3),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "sequences": torch.zeros(3),
        "rollout_logprobs": rollout,
        "fresh": torch.ones(3),
        column: proximal if column == "proximal_logprobs" else torch.full((3,), 0.25),
    }
    terms = rank(now.clone().requires_grad_(), torch.zeros(3), columns)
    ratio = (now - proximal).exp()
    plain = torch.minimum(ratio * columns["advantages"], ratio.clamp(0.8, 1.2) * columns["advantages"])
    expected = -((proximal - rollout).exp() * plain).sum()
    torch.testing.assert_close(terms.loss.detach(), expected)


def test_metrics_of_steps_add_up_or_are_means_and_distances_are_those_before_any_step() -> None:
    one = {"loss": 1.0, "tokens/trained": 4.0, "time/optimizer_s": 1.0, "probs_diff/mean": 0.1}
    other = {"loss": 3.0, "tokens/trained": 6.0, "time/optimizer_s": 2.0, "probs_diff/mean": 0.9}
    assert metrics_of_steps([one, other]) == {
        "loss": 2.0,
        "tokens/trained": 10.0,
        "time/optimizer_s": 3.0,
        "probs_diff/mean": 0.1,
    }


def test_preferences_are_learned_in_one_step() -> None:
    spec = session_pb2.SessionSpec(
        role=session_pb2.ROLE_POLICY,
        optimizer=as_struct({"steps_per_update": 1, "epochs_per_update": 2}),
        objective=wire_objective("preference", {"loss": "sigmoid", "beta": 0.1}),
    )
    with pytest.raises(InvalidRequest, match="one step an update"):
        session_settings(spec)
