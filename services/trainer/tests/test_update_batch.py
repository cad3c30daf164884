"""What the front refuses before a rank sees it, and what it makes of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flotilla.trainer.v1 import session_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import FlotillaError, InvalidRequest, NotFinite
from flotilla_core.tensors import to_tensor
from flotilla_trainer.update_batch import ModelLimits, UpdateBatch

LIMITS = ModelLimits(vocabulary=16, max_sequence_tokens=12)
GRPO = session_pb2.Objective(grpo=session_pb2.GrpoObjective(temperature=1, clip_low=0.2, clip_high=0.2))
SFT = session_pb2.Objective(sft=session_pb2.SftObjective())


def sample(name: str, tokens: list[int], reward: float = 0.0, **fields: Any) -> pb.TrainSample:
    given = {"logprobs": np.full(len(tokens), -1.0, np.float32)} | fields
    return pb.TrainSample(
        sample_id=name,
        token_ids=to_tensor(np.array(tokens, np.int32)),
        reward=reward,
        **{key: to_tensor(value) for key, value in given.items() if value is not None},
    )


def group(name: str, prompt: list[int], *samples: pb.TrainSample) -> pb.TrainGroup:
    return pb.TrainGroup(
        group_id=name, prompt_token_ids=to_tensor(np.array(prompt, np.int32)), samples=samples
    )


def read(*groups: pb.TrainGroup) -> UpdateBatch:
    return UpdateBatch.read(groups, LIMITS)


def test_a_batch_is_laid_out_in_the_order_of_the_wire() -> None:
    batch = read(
        group("g0", [1, 2], sample("a", [3, 4, 5], 1.0), sample("b", [6], 0.0)),
        group("g1", [7], sample("c", [8, 9], 2.0), sample("d", [10], 4.0), sample("e", [11], 3.0)),
    )
    sequences = batch.sequences(GRPO, shuffle_seed=0)
    assert sequences.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 9, 7, 10, 7, 11]
    assert sequences.lengths.tolist() == [5, 3, 3, 2, 2]
    assert sequences.tokens[sequences.scored].tolist() == [3, 4, 5, 6, 8, 9, 10, 11]
    assert sequences.columns["advantages"].tolist() == [0.5, 0.5, 0.5, -0.5, -1.0, -1.0, 1.0, 0.0]


def test_masked_tokens_are_context_and_not_trained() -> None:
    batch = read(group("g", [1], sample("a", [2, 3, 4], mask=np.array([True, False, True]))))
    sequences = batch.sequences(SFT, shuffle_seed=0)
    assert sequences.tokens.tolist() == [1, 2, 3, 4]
    assert sequences.tokens[sequences.scored].tolist() == [2, 4]


def test_advantages_of_the_caller_are_taken_as_they_are() -> None:
    own = np.array([0.25, -4.0], np.float32)
    sequences = read(group("g", [1], sample("a", [2, 3], 1.0, advantages=own))).sequences(GRPO, 0)
    np.testing.assert_array_equal(sequences.columns["advantages"], own)


def test_shuffled_rewards_are_the_same_rewards_in_another_order() -> None:
    objective = session_pb2.Objective(grpo=session_pb2.GrpoObjective(shuffle_rewards=True))
    groups = [group(f"g{i}", [1], *(sample(f"{i}/{j}", [2], float(j)) for j in range(4))) for i in range(8)]
    plain = read(*groups).sequences(GRPO, 5).columns["advantages"]
    shuffled = read(*groups).sequences(objective, 5).columns["advantages"]
    again = read(*groups).sequences(objective, 5).columns["advantages"]
    assert (shuffled != plain).any()
    np.testing.assert_array_equal(shuffled, again)


NAN = np.array([-1.0, np.nan], np.float32)
WRONG = {
    "empty update": ([], "no samples"),
    "empty group": ([group("g", [1], sample("ok", [2])), group("g7", [1])], "g7"),
    "no prompt": ([group("g7", [], sample("bad", [2]))], "g7"),
    "no response": ([group("g", [1], sample("ok", [2]), sample("bad", []))], "bad"),
    "id twice": ([group("g", [1], sample("bad", [2]), sample("bad", [3]))], "bad"),
    "token above": ([group("g", [1], sample("ok", [15]), sample("bad", [16]))], "bad"),
    "token below": ([group("g", [1], sample("ok", [2]), sample("bad", [2, -1]))], "bad"),
    "too long": ([group("g", [1] * 4, sample("ok", [2]), sample("bad", [2] * 9))], "bad"),
    "logprobs short": (
        [group("g", [1], sample("bad", [2, 3], logprobs=np.array([-1.0], np.float32)))],
        "bad",
    ),
    "logprobs of one only": ([group("g", [1], sample("ok", [2]), sample("bad", [3], logprobs=None))], "bad"),
    "logprobs not finite": ([group("g", [1], sample("bad", [2, 3], logprobs=NAN))], "bad"),
    "mask short": ([group("g", [1], sample("bad", [2, 3], mask=np.array([True])))], "bad"),
    "mask of numbers": ([group("g", [1], sample("bad", [2], mask=np.array([1], np.int32)))], "bad"),
    "nothing trained": ([group("g", [1], sample("a", [2], mask=np.array([False])))], "no token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_batch_is_refused_by_name(case: str) -> None:
    groups, name = WRONG[case]
    with pytest.raises(InvalidRequest, match=name):
        read(*groups)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [(sample("bad", [2], float("nan")), NotFinite), (sample("bad", [2], logprobs=None), InvalidRequest)],
)
def test_grpo_refuses_what_it_cannot_use_by_name(broken: pb.TrainSample, kind: type[FlotillaError]) -> None:
    with pytest.raises(kind, match="bad"):
        read(group("g", [1], broken)).sequences(GRPO, 0)
    read(group("g", [1], broken)).sequences(SFT, 0)  # nothing of it matters there
