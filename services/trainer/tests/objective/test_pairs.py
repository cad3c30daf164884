"""Preferences on a small model: what the front tells of its pairs, and what is no pair is refused by name.

The model is a table of bigrams, whose logits depend on the token before alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_testing.pairs import equal_answers, lone_sample, make_pairs
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.session_objective import session_objective
from flotilla_trainer.wire.objective import ObjectiveSettings

VOCABULARY = 13


def objective_of(**fields: Any) -> ObjectiveSettings:
    return ObjectiveSettings.from_wire(wire_objective("preference", fields))


def table(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)


POLICY, REFERENCE = table(1), table(2)


def scores(model: torch.Tensor, sequences: Sequences) -> np.ndarray:
    tokens = torch.from_numpy(sequences.tokens).long()
    before, after = tokens[sequences.scored - 1], tokens[sequences.scored]
    return torch.log_softmax(model, -1)[before, after].numpy().astype(np.float32)


def metrics_of(objective: ObjectiveSettings, groups: list[pb.TrainGroup]) -> dict[str, float]:
    front = session_objective(objective)
    batch = UpdateBatch.read(groups, ModelLimits(VOCABULARY, 0), Version(0, 0))
    if front.scores_reference(batch):
        batch = replace(batch, reference_logprobs=scores(REFERENCE, batch.all_responses()))
    return front.sequences(batch, 0, scores(POLICY, batch.all_responses()))[1]


def test_metrics_say_how_far_the_chosen_answers_are_ahead() -> None:
    groups = make_pairs(4, VOCABULARY, masked=True)
    objective = objective_of(loss="sigmoid", beta=0.5)
    metrics = metrics_of(objective, groups)
    assert metrics["preference/margin"] == pytest.approx(
        metrics["preference/chosen_reward"] - metrics["preference/rejected_reward"]
    )
    # With the answers exchanged, the margin changes its sign.
    for group in groups:
        chosen, rejected = list(group.samples)
        del group.samples[:]
        group.samples.extend([rejected, chosen])
    swapped = metrics_of(objective, groups)
    assert swapped["preference/accuracy"] == 1 - metrics["preference/accuracy"]
    assert swapped["preference/margin"] == pytest.approx(-metrics["preference/margin"])
    assert swapped["preference/chosen_logprob"] == pytest.approx(metrics["preference/rejected_logprob"])


def test_before_the_first_update_no_answer_is_ahead() -> None:
    batch = UpdateBatch.read(
        make_pairs(3, VOCABULARY, masked=True), ModelLimits(VOCABULARY, 0), Version(0, 0)
    )
    same = scores(POLICY, batch.all_responses())
    front = session_objective(objective_of(loss="sigmoid", beta=0.1))
    _, metrics = front.sequences(replace(batch, reference_logprobs=same), 0, same)
    assert (metrics["preference/accuracy"], metrics["preference/margin"]) == (0.5, 0.0)
    assert metrics["loss"] == pytest.approx(np.log(2))


def third_sample(groups: list[pb.TrainGroup]) -> None:
    groups[1].samples.add(sample_id="g1/2", token_ids=groups[0].samples[0].token_ids)


def nothing_counts(groups: list[pb.TrainGroup]) -> None:
    length = len(from_tensor(groups[1].samples[1].token_ids))
    groups[1].samples[1].mask.CopyFrom(to_tensor(np.zeros(length, bool)))


def empty_answer(groups: list[pb.TrainGroup]) -> None:
    groups[1].samples[1].ClearField("token_ids")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (third_sample, "a pair has two samples, this group has 3"),
        (lone_sample, "a pair has two samples, this group has 1"),
        (equal_answers, "both answers of a pair are the same"),
        (nothing_counts, "no token of an answer counts"),
        (empty_answer, "there are no tokens"),
    ],
)
def test_what_is_no_pair_is_refused_by_its_sample(spoil: Any, said: str) -> None:
    groups = make_pairs(3, VOCABULARY, masked=True)
    spoil(groups)
    objective = objective_of(loss="sigmoid", beta=0.1)
    with pytest.raises(InvalidRequest, match=said) as caught:
        metrics_of(objective, groups)
    assert "'g1/" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"loss": "none"}, "loss"),
        ({"loss": "ipo", "beta": 0}, "beta"),
        ({"loss": "ipo", "beta": 1e9}, "beta"),
        ({"loss": "sigmoid", "beta": 1, "label_smoothing": 0.5}, "label_smoothing"),
        ({"loss": "hinge", "beta": 1, "label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_an_objective_that_cannot_be_is_refused_by_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"spec\.objective\.section.*{named}"):
        objective_of(**fields)
