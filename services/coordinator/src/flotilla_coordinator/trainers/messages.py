"""Writes groups as messages to a gang, in parts that fit one message each.

Invariants: a sample is never cut, and a group only where it does not fit one message; a part holds at least one of
them; a field that a sample lacks stays empty in its message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from flotilla.common.v1 import tensor_pb2, version_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample
from flotilla_core.rpc.channel import PART_BYTES
from flotilla_core.tensors import to_tensor

PIECE_BYTES = 16 << 20
"""The size of a message without its last sample; a sample may take up to three times as much (algorithm.teacher)."""
NO_PROMPT = np.zeros(0, np.int32)


def parts(groups: Iterable[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
    """Return groups about two mebibytes at a time; a group that is too large for one message is cut into pieces."""
    part: list[RolloutGroup] = []
    size = 0
    for piece in (piece for group in groups for piece in _pieces(group)):
        part.append(piece)
        size += piece.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _pieces(group: RolloutGroup) -> Iterator[RolloutGroup]:
    """Return the group, or pieces of a large one with some samples each; only the first piece has the prompt."""
    piece = replace(group, samples=[])
    for sample in group.samples:
        if piece.samples and piece.nbytes + sample.nbytes > PIECE_BYTES:
            yield piece
            piece = replace(group, prompt_token_ids=NO_PROMPT, samples=[])
        piece.samples.append(sample)
    yield piece


def fill(message: pb.TrainGroup, group: RolloutGroup) -> None:
    """Fill a message in place, because a step's tokens are megabytes and each copy costs time."""
    message.group_id = group.group_id
    message.prompt_token_ids.CopyFrom(to_tensor(group.prompt_token_ids))
    for sample in group.samples:
        message.samples.add(
            sample_id=sample.sample_id,
            token_ids=to_tensor(sample.token_ids),
            logprobs=_column(sample.logprobs),
            mask=_column(sample.trained),
            values=_column(sample.values),
            value_after=sample.value_after,
            truncated=sample.truncated,
            reference_logprobs=_column(sample.reference_logprobs),
            teacher_logprobs=_column(sample.teacher_logprobs),
            teacher_top_token_ids=_column(sample.teacher_top_token_ids),
            teacher_top_logprobs=_column(sample.teacher_top_logprobs),
            reward=sample.reward,
            reward_terms=sample.reward_terms,
            greedy_reward=sample.greedy_reward,
            version_spans=[
                version_pb2.VersionSpan(version=span.version.to_proto(), start=span.start, end=span.end)
                for span in sample.spans
            ],
            branches=_branches(sample),
            turns=_turns(sample),
        )


def scored_parts(groups: Iterable[RolloutGroup], answer_bytes: int = 4) -> Iterator[list[pb.ScoredSequence]]:
    """Return every sample as a sequence that a gang scores, with `answer_bytes` for each token of the answer.

    A part has about two mebibytes, or fewer where the answers would not fit one message. Each sequence includes its
    prompt, so long prompts with many short answers are far larger here than as groups.
    """
    part: list[pb.ScoredSequence] = []
    size = answers = 0
    for group in groups:
        prompt = to_tensor(group.prompt_token_ids)
        for sample in group.samples:
            answer = answer_bytes * sample.token_ids.size
            if part and answers + answer > PIECE_BYTES:
                yield part
                part, size, answers = [], 0, 0
            part.append(
                pb.ScoredSequence(
                    sequence_id=sample.sample_id,
                    prompt_token_ids=prompt,
                    token_ids=to_tensor(sample.token_ids),
                    branches=_branches(sample),
                )
            )
            size += group.prompt_token_ids.nbytes + sample.token_ids.nbytes
            size += 0 if sample.episode is None else sample.episode.nbytes
            answers += answer
            if size >= PART_BYTES:
                yield part
                part, size, answers = [], 0, 0
    if part:
        yield part


def in_parts(sequences: Iterable[pb.ScoredSequence]) -> Iterator[list[pb.ScoredSequence]]:
    """Return sequences about two mebibytes at a time."""
    part: list[pb.ScoredSequence] = []
    size = 0
    for sequence in sequences:
        part.append(sequence)
        size += len(sequence.prompt_token_ids.data)
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _branches(sample: RolloutSample) -> list[pb.Branch]:
    """Return the sequences of an episode, each with its prompt."""
    return [
        pb.Branch(start=branch.start, prompt_token_ids=to_tensor(branch.prompt_token_ids))
        for branch in (() if sample.episode is None else sample.episode.branches)
    ]


def _turns(sample: RolloutSample) -> list[pb.RewardedTurn]:
    """Return the turns of an episode, where its environment rewards them or names their states."""
    episode = sample.episode
    if episode is None or not episode.turn_ends:
        return []
    none = (0,) * len(episode.turn_ends)
    return [
        pb.RewardedTurn(end=end, reward=reward, state=state)
        for end, reward, state in zip(
            episode.turn_ends, episode.turn_rewards or none, episode.turn_states or none, strict=True
        )
    ]


def _column(numbers: np.ndarray | None) -> tensor_pb2.Tensor | None:
    return None if numbers is None else to_tensor(numbers)
