"""Samples without a column that their objective needs are refused; no default takes its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.wire.objective import ObjectiveSettings

COUNT = 5
TEACHER = {"coefficient": 2.0, "reward_weight": 0.0}
REFERENCE = {
    "placement": "loss",
    "estimator": "k3",
    "coefficient": 0.1,
    "reference": "service",
}


def front_of(
    advantage: str, parameters: dict[str, Any], reward_clip: float | None = None, **changes: Any
) -> PolicyObjective:
    section = {"advantage": {"type": advantage, "reward_clip": reward_clip, **parameters}, **changes}
    if advantage == "gae":
        section["critic"] = {}
    return PolicyObjective(ObjectiveSettings.from_wire(wire_objective("policy", section)))


def group_with(*columns: str) -> pb.TrainGroup:
    """Two samples of one prompt; the columns start at -0.1 and fall by a tenth a token."""
    numbers = to_tensor(-0.1 * np.arange(1, COUNT + 1, dtype=np.float32))
    group = pb.TrainGroup(group_id="g", prompt_token_ids=to_tensor(np.array([1, 2], np.int32)))
    for index in range(2):
        sample = group.samples.add(sample_id=f"g/{index}", reward=float(index), truncated=True)
        sample.token_ids.CopyFrom(to_tensor(np.arange(COUNT, dtype=np.int32)))
        for column in columns:
            getattr(sample, column).CopyFrom(numbers)
    return group


def batch_with(*columns: str) -> UpdateBatch:
    return UpdateBatch.read([group_with(*columns)], ModelLimits(9, 0), Version(0, 0))


@pytest.mark.parametrize(
    ("advantage", "parameters", "columns", "lacks"),
    [
        ("gae", {"gamma": 1.0, "lam": 1.0}, ("logprobs",), "values"),
        ("gae", {"gamma": 1.0, "lam": 1.0}, ("logprobs", "values"), "value_after"),
        ("distill", TEACHER, ("logprobs",), "teacher_logprobs"),
        ("gdpo", {"weights": [1.0, 0.5]}, ("logprobs",), "reward_terms"),
        ("remax", {}, ("logprobs",), "greedy_reward"),
        ("distill", TEACHER, ("teacher_logprobs",), "logprobs"),
    ],
)
def test_an_advantage_without_what_it_is_made_of_is_refused(
    advantage: str, parameters: dict[str, Any], columns: tuple[str, ...], lacks: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"sample 'g/0'.*`{lacks}` is empty"):
        front_of(advantage, parameters).sequences(batch_with(*columns), 0)


def test_states_that_no_environment_names_are_missed_with_the_way_to_name_them() -> None:
    group = group_with("logprobs")
    for sample in group.samples:
        sample.turns.add(end=COUNT, reward=0.5)
    with pytest.raises(InvalidRequest, match=r"g/0.*names its state.*`state` of Begun and Reply"):
        front_of("gigpo", {}).sequences(UpdateBatch.read([group], ModelLimits(9, 0), Version(0, 0)), 0)
    group.samples[1].turns[0].state = -7
    batch = UpdateBatch.read([group], ModelLimits(9, 0), Version(0, 0))
    made, metrics = front_of("gigpo", {}).sequences(batch, 0)
    assert made.columns["advantages"].any() and metrics["turns/compared_share"] == 0
    group.samples[0].turns[0].state = -7
    batch = UpdateBatch.read([group], ModelLimits(9, 0), Version(0, 0))
    assert front_of("gigpo", {}).sequences(batch, 0)[1]["turns/compared_share"] == 1


TAUGHT = {"top_k": 3, "divergence": "forward", "coefficient": 0.5, "tail": True}


def taught_group(k: int) -> pb.TrainGroup:
    """Return a group whose teacher names the tokens 0 to k - 1 everywhere, each half as likely as the one before."""
    group = group_with("logprobs")
    for sample in group.samples:
        ids = np.tile(np.arange(k, dtype=np.int32), (COUNT, 1))
        sample.teacher_top_token_ids.CopyFrom(to_tensor(ids))
        sample.teacher_top_logprobs.CopyFrom(to_tensor(np.log(0.5 ** (ids + 1)).astype(np.float32)))
    return group


def test_samples_without_the_likeliest_tokens_of_a_teacher_or_with_too_many_are_refused() -> None:
    front = front_of("grpo", {"baseline": "group", "normalize_std": True}, teacher=TAUGHT)
    with pytest.raises(InvalidRequest, match=r"sample 'g/0'.*`teacher_top_token_ids` is empty"):
        front.sequences(batch_with("logprobs"), 0)
    many = UpdateBatch.read([taught_group(4)], ModelLimits(9, 0), Version(0, 0))
    with pytest.raises(InvalidRequest, match=r"has 4 tokens at each.*algorithm\.teacher\.top_k is 3"):
        front.sequences(many, 0)


def test_likeliest_tokens_reach_the_ranks_as_they_came_with_the_weights_of_the_update() -> None:
    batch = UpdateBatch.read([taught_group(3)], ModelLimits(9, 0), Version(0, 0))
    front = front_of("grpo", {"baseline": "group", "normalize_std": True}, teacher=TAUGHT)
    sequences, metrics = front.sequences(batch, 0)
    columns = sequences.columns
    assert columns["teacher_top_ids"].dtype == np.int32
    np.testing.assert_array_equal(columns["teacher_top_ids"], batch.teacher_top_token_ids)
    np.testing.assert_array_equal(columns["teacher_top_logprobs"], batch.teacher_top_logprobs)
    np.testing.assert_allclose(columns["teacher_weights"], 0.5 * columns["weights"])
    assert metrics["teacher/mass"] == pytest.approx(0.875)


def table(array: Any, dtype: Any = np.float32) -> Any:
    return to_tensor(np.array(array, dtype))


@pytest.mark.parametrize(
    ("field", "tensor", "said"),
    [
        ("teacher_top_logprobs", table([]), "`teacher_top_logprobs` is empty"),
        ("teacher_top_token_ids", table([], np.int32), "`teacher_top_token_ids` is empty"),
        ("teacher_top_logprobs", table([[-1.0, -2.0]] * 4), r"is float32\[4, 2\], not numbers \[5, k\]"),
        ("teacher_top_logprobs", table([-1.0] * 5), r"is float32\[5\], not numbers \[5, k\]"),
        ("teacher_top_token_ids", table([[0.0, 1.0]] * 5), r"is float32\[5, 2\], not token ids \[5, k\]"),
        ("teacher_top_token_ids", table([[0, 1, 2]] * 5, np.int32), "has 3 tokens at each.*and `.*` 2"),
        (
            "teacher_top_token_ids",
            table([[0, 9]] * 5, np.int32),
            "a token that the model does not have.*0 to 8",
        ),
        ("teacher_top_token_ids", table([[0, -1]] * 5, np.int32), "a token that the model does not have"),
        ("teacher_top_token_ids", table([[3, 3]] * 5, np.int32), "names a token twice"),
        ("teacher_top_logprobs", table([[-1.0, np.nan]] * 5), "`teacher_top_logprobs`.*is not finite"),
        ("teacher_top_logprobs", table([[-np.inf, -1.0]] * 5), "`teacher_top_logprobs`.*is not finite"),
        ("teacher_top_logprobs", table([[-1.0, 0.5]] * 5), "holds 0.5, and no logarithm of a probability"),
        ("teacher_top_logprobs", table([[-0.1, -0.1]] * 5), "a probability of 1.80967 together"),
    ],
)
def test_likeliest_tokens_that_cannot_be_are_refused_by_sample_and_field(
    field: str, tensor: Any, said: str
) -> None:
    group = taught_group(2)
    getattr(group.samples[1], field).CopyFrom(tensor)
    with pytest.raises(InvalidRequest, match=f"{said}.*") as caught:
        UpdateBatch.read([group], ModelLimits(9, 0), Version(0, 0))
    assert "sample 'g/1'" in str(caught.value) and field in str(caught.value)


def test_every_position_of_an_update_comes_with_as_many_likeliest_tokens() -> None:
    group = taught_group(2)
    for field in ("teacher_top_token_ids", "teacher_top_logprobs"):
        getattr(group.samples[1], field).CopyFrom(getattr(taught_group(3).samples[1], field))
    with pytest.raises(InvalidRequest, match=r"has 3 tokens at each.*sample 'g/1'.*first sample.*has 2"):
        UpdateBatch.read([group], ModelLimits(9, 0), Version(0, 0))


def test_a_reference_that_is_sent_is_not_scored_again_and_one_that_is_missing_is_refused() -> None:
    grpo = {"baseline": "group", "normalize_std": True}
    front = front_of("grpo", grpo, kl=REFERENCE)
    sent = batch_with("logprobs", "reference_logprobs")
    assert not front.scores_reference(sent)
    sequences, metrics = front.sequences(sent, 0)
    np.testing.assert_array_equal(sequences.columns["reference_logprobs"], sent.reference_logprobs)
    assert metrics["kl/mean"] == 0.0
    with pytest.raises(InvalidRequest, match=r"sample 'g/0'.*`reference_logprobs` is empty"):
        front.scores_reference(batch_with("logprobs"))
    kept = front_of("grpo", grpo, kl=REFERENCE | {"reference": "frozen"})
    assert kept.scores_reference(batch_with("logprobs")) and not kept.scores_reference(sent)
