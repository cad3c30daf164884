"""The front refuses invalid samples before a rank sees them, and reads the valid ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flotilla.common.v1 import version_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_trainer.batch.tokens import ModelLimits, read_scored
from flotilla_trainer.batch.update_batch import StepPlan, UpdateBatch
from flotilla_trainer.objective.policy_columns import segments_of

LIMITS = ModelLimits(vocabulary=16, max_sequence_tokens=12)
VERSION = Version(0, 7)


def sample(name: str, tokens: list[int], reward: float = 0.0, **fields: Any) -> pb.TrainSample:
    given = {"logprobs": np.full(len(tokens), -1.0, np.float32)} | fields
    return pb.TrainSample(
        sample_id=name,
        token_ids=to_tensor(np.array(tokens, np.int32)),
        reward=reward,
        **{key: to_tensor(value) for key, value in given.items() if value is not None},
    )


def turned(one: pb.TrainSample, *turns: tuple[int, float] | tuple[int, float, int]) -> pb.TrainSample:
    for end, reward, *state in turns:
        one.turns.add(end=end, reward=reward, state=sum(state))
    return one


def group(name: str, prompt: list[int], *samples: pb.TrainSample) -> pb.TrainGroup:
    return pb.TrainGroup(
        group_id=name, prompt_token_ids=to_tensor(np.array(prompt, np.int32)), samples=samples
    )


def read(*groups: pb.TrainGroup) -> UpdateBatch:
    return UpdateBatch.read(groups, LIMITS, VERSION)


def test_a_batch_is_laid_out_in_the_order_of_the_wire() -> None:
    batch = read(
        group("g0", [1, 2], sample("a", [3, 4, 5], 1.0), sample("b", [6], 0.0)),
        group("g1", [7], sample("c", [8, 9], 2.0), sample("d", [10], 4.0), sample("e", [11], 3.0)),
    )
    sequences = batch.sequences({"places": np.arange(8)})
    assert sequences.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 9, 7, 10, 7, 11]
    assert sequences.lengths.tolist() == [5, 3, 3, 2, 2]
    assert sequences.tokens[sequences.scored].tolist() == [3, 4, 5, 6, 8, 9, 10, 11]
    assert sequences.columns["places"].tolist() == list(range(8))
    assert batch.rewards.tolist() == [1.0, 0.0, 2.0, 4.0, 3.0]
    assert batch.group_sizes.tolist() == [2, 3]


def test_masked_tokens_are_context_and_not_trained() -> None:
    batch = read(group("g", [1], sample("a", [2, 3, 4], mask=np.array([True, False, True]))))
    sequences = batch.sequences({"places": np.arange(3)})
    assert sequences.tokens.tolist() == [1, 2, 3, 4]
    assert sequences.tokens[sequences.scored].tolist() == [2, 4]
    assert sequences.columns["places"].tolist() == [0, 2]
    assert batch.all_responses().scored.tolist() == [1, 2, 3]


def test_the_reward_of_a_turn_stands_at_its_last_token() -> None:
    one = group("g", [1], sample("a", [2, 3]), turned(sample("b", [4, 5, 6]), (3, -1.0), (1, 0.5)))
    rewards = read(one).turn_rewards
    assert rewards is not None and rewards.tolist() == [0.0, 0.0, 0.5, 0.0, -1.0]
    assert read(group("g", [1], sample("a", [2, 3]))).turn_rewards is None


def test_the_state_of_a_turn_stands_at_its_last_token() -> None:
    least, most = -(2**63), 2**63 - 1
    one = group(
        "g", [1], turned(sample("a", [2, 3]), (2, 0.0, most)), turned(sample("b", [4, 5]), (1, 0.5, least))
    )
    states = read(one).turn_states
    assert states is not None and states.tolist() == [0, most, least, 0]
    assert read(group("g", [1], turned(sample("a", [2, 3]), (2, 1.0)))).turn_states is None


def test_a_turn_without_tokens_earns_with_the_rest_and_has_no_state() -> None:
    one = group("g", [1], turned(sample("a", [2, 3, 4]), (0, 0.5, 7), (1, 0.25, 3), (0, 1.0, 7), (3, 0.0, 3)))
    batch = read(one)
    assert batch.turn_rewards is not None and batch.turn_states is not None
    assert batch.turn_rewards.tolist() == [0.25, 0.0, 0.0] and batch.turn_states.tolist() == [3, 0, 3]


def test_turns_that_end_at_the_same_token_have_their_rewards_together() -> None:
    rewards = read(group("g", [1], turned(sample("a", [2, 3]), (1, 0.5), (1, 0.25)))).turn_rewards
    assert rewards is not None and rewards.tolist() == [0.75, 0.0]


def spans(*parts: tuple[int, int, int, int]) -> list[version_pb2.VersionSpan]:
    return [
        version_pb2.VersionSpan(version=Version(lineage, step).to_proto(), start=start, end=end)
        for lineage, step, start, end in parts
    ]


def test_staleness_counts_versions_token_by_token() -> None:
    old = sample("a", [2, 3, 4, 5])
    old.version_spans.extend(spans((0, 4, 0, 1), (0, 6, 1, 3), (0, 7, 3, 4)))
    batch = read(group("g", [1], sample("new", [2, 3]), old))
    assert batch.staleness.tolist() == [0, 0, 3, 1, 1, 0]


@pytest.mark.parametrize(
    ("span", "why"),
    [
        ((0, 8, 0, 2), "does not exist yet"),
        ((1, 2, 0, 2), "does not exist yet"),
        ((0, 7, 0, 3), "are not within"),
    ],
)
def test_version_spans_that_cannot_be_are_refused_by_name(span: tuple[int, int, int, int], why: str) -> None:
    wrong = sample("bad", [2, 3])
    wrong.version_spans.extend(spans(span))
    with pytest.raises(InvalidRequest, match=why) as caught:
        read(group("g", [1], sample("ok", [2]), wrong))
    assert "'bad'" in str(caught.value)


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
    "turns without ends": ([group("g", [1], turned(sample("bad", [2, 3]), (0, 0.5), (0, 1.0)))], "bad"),
    "turn beyond the end": ([group("g", [1], turned(sample("bad", [2, 3]), (3, 0.5)))], "bad"),
    "reward of a turn": ([group("g", [1], turned(sample("bad", [2, 3]), (1, float("nan"))))], "bad"),
    "nothing trained": ([group("g", [1], sample("a", [2], mask=np.array([False])))], "no token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_batch_is_refused_by_name(case: str) -> None:
    groups, name = WRONG[case]
    with pytest.raises(InvalidRequest, match=name):
        read(*groups)


def test_only_tokens_of_samples_that_the_trained_version_began_and_claims_are_fresh() -> None:
    begun_before, begun_by_it = sample("a", [2, 3, 4, 5]), sample("b", [2, 3, 4])
    for start, end, version in ((0, 2, Version(0, 6)), (2, 3, Version(0, 7))):
        begun_before.version_spans.add(start=start, end=end).version.CopyFrom(version.to_proto())
    begun_by_it.version_spans.add(start=0, end=2).version.CopyFrom(Version(0, 7).to_proto())
    batch = read(group("g", [1], begun_before, begun_by_it))
    assert batch.fresh.tolist() == [False] * 4 + [True, True, False]
    assert batch.staleness.tolist() == [1, 1, 0, 0, 0, 0, 0]


def with_terms(name: str, *terms: float) -> pb.TrainSample:
    made = sample(name, [2, 3])
    made.reward_terms.extend(terms)
    return made


def test_terms_of_rewards_are_one_row_each() -> None:
    batch = read(group("g", [1], with_terms("a", 0.5, 2.0), with_terms("b", -1.0, 4.0)))
    assert batch.reward_terms is not None
    assert batch.reward_terms.tolist() == [[0.5, -1.0], [2.0, 4.0]]
    assert read(group("g", [1], sample("a", [2]))).reward_terms is None


@pytest.mark.parametrize("terms", [(), (1.0,), (1.0, float("nan"))])
def test_a_sample_with_other_terms_than_the_first_is_named(terms: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequest, match="the first sample of the update has 2 terms") as error:
        read(group("g", [1], with_terms("a", 0.5, 2.0), with_terms("b", *terms)))
    assert error.value.where == "sample 'b'"


def beside(greedy: float | None, *names: str) -> list[pb.TrainSample]:
    """Return samples of one prompt whose greedy response earned this."""
    samples = [sample(name, [2, 3]) for name in names]
    for one in samples:
        if greedy is not None:
            one.greedy_reward = greedy
    return samples


def test_greedy_rewards_are_one_a_group() -> None:
    batch = read(group("g", [1], *beside(0.0, "a", "b")), group("h", [1], *beside(-0.5, "c")))
    assert batch.greedy_reward is not None
    assert batch.greedy_reward.tolist() == [0.0, -0.5]
    assert read(group("g", [1], sample("a", [2]))).greedy_reward is None


@pytest.mark.parametrize("greedy", [None, 0.25, float("nan")])
def test_a_sample_without_the_greedy_reward_of_its_group_is_named(greedy: float | None) -> None:
    with pytest.raises(InvalidRequest, match=r"`greedy_reward` is .*one greedy response") as error:
        read(group("g", [1], *beside(0.5, "a"), *beside(greedy, "b")), group("h", [1], *beside(0.5, "c")))
    assert error.value.where == "sample 'b'"


def branched(name: str, tokens: list[int], *branches: tuple[int, list[int]], **fields: Any) -> pb.TrainSample:
    made = sample(name, tokens, **fields)
    for start, prompt in branches:
        made.branches.add(start=start, prompt_token_ids=to_tensor(np.array(prompt, np.int32)))
    return made


def test_branches_are_sequences_of_one_sample_each_after_its_own_prompt() -> None:
    batch = read(
        group("g0", [1, 2], branched("a", [3, 4, 5], (0, [8]), (2, [9, 9]), reward=1.0), sample("b", [6])),
        group("g1", [7], sample("c", [10])),
    )
    sequences = batch.sequences({"places": np.arange(5)})
    assert sequences.tokens.tolist() == [8, 3, 4, 9, 9, 5, 1, 2, 6, 7, 10]
    assert sequences.lengths.tolist() == [3, 3, 3, 2]
    assert sequences.tokens[sequences.scored].tolist() == [3, 4, 5, 6, 10]
    assert sequences.columns["places"].tolist() == list(range(5))
    assert batch.response_lengths.tolist() == [3, 1, 1] and batch.rewards.tolist() == [1.0, 0.0, 0.0]
    assert batch.all_responses().scored.tolist() == sequences.scored.tolist()


def test_stretches_end_with_their_branch() -> None:
    batch = read(group("g", [1], branched("a", [3, 4, 5, 6], (0, [8]), (2, [9]))))
    assert segments_of(batch).tolist() == [1, 1, 2, 2]


def test_each_optimizer_step_has_whole_samples_with_all_their_branches() -> None:
    batch = read(
        group("g0", [1], branched("a", [3, 4, 5], (0, [8]), (1, [9]), (2, [9]))),
        group("g1", [7], sample("c", [10])),
    )
    first, second = StepPlan(mini_batches=2).steps(batch.sequences({"weights": np.ones(4)}), batch)
    assert first.lengths.tolist() == [2, 2, 2] and second.tokens.tolist() == [7, 10]


@pytest.mark.parametrize("starts", [[1], [0, 0], [0, 3], [0, 2, 1]])
def test_branches_that_do_not_cover_their_sample_are_refused(starts: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="branches start at"):
        read(group("g", [1], branched("a", [3, 4, 5], *((start, [8]) for start in starts))))


def test_a_group_whose_samples_all_have_branches_needs_no_prompt() -> None:
    batch = read(group("g", [], branched("a", [3, 4], (0, [8])), branched("b", [5], (0, [9]))))
    assert batch.sequences().tokens.tolist() == [8, 3, 4, 9, 5]
    with pytest.raises(InvalidRequest, match="there are no tokens"):
        read(group("g", [], branched("a", [3, 4], (0, [8])), sample("b", [5])))


def test_a_branch_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="there are no tokens"):
        read(group("g", [1], branched("a", [3, 4], (0, []))))


def test_scores_of_branches_come_in_the_order_of_the_sample() -> None:
    scored = pb.ScoredSequence(
        sequence_id="a",
        token_ids=to_tensor(np.array([3, 4, 5], np.int32)),
        branches=branched("a", [3, 4, 5], (0, [8]), (2, [9, 9])).branches,
    )
    ids, sequences, lengths = read_scored([scored], LIMITS)
    assert (ids, lengths.tolist()) == (["a"], [3])
    assert sequences.tokens[sequences.scored].tolist() == [3, 4, 5] and sequences.lengths.tolist() == [3, 3]
    _, sequences, lengths = read_scored([scored], LIMITS, after_last=True)
    assert lengths.tolist() == [4] and sequences.lengths.tolist() == [3, 4]
