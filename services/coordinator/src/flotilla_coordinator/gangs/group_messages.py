"""Groups as messages to a gang, in parts that one message holds.

Invariants: a group is never cut; a part holds at least one; what a sample does not have stays empty in its message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from flotilla.common.v1 import tensor_pb2, version_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.rollouts.batch import RolloutGroup
from flotilla_core.rpc.options import PART_BYTES
from flotilla_core.tensors import to_tensor


def parts(groups: Iterable[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
    """Whole groups, about two mebibytes at a time."""
    part: list[RolloutGroup] = []
    size = 0
    for group in groups:
        part.append(group)
        size += group.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def fill(message: pb.TrainGroup, group: RolloutGroup) -> None:
    """Write a group into a message where it lies: a step's tokens are megabytes, and each copy shows."""
    message.group_id = group.group_id
    message.prompt_token_ids.CopyFrom(to_tensor(group.prompt_token_ids))
    for sample in group.samples:
        message.samples.add(
            sample_id=sample.sample_id,
            token_ids=to_tensor(sample.token_ids),
            logprobs=_column(sample.logprobs),
            values=_column(sample.values),
            value_after=sample.value_after,
            truncated=sample.truncated,
            reference_logprobs=_column(sample.reference_logprobs),
            teacher_logprobs=_column(sample.teacher_logprobs),
            reward=sample.reward,
            reward_terms=sample.reward_terms,
            greedy_reward=sample.greedy_reward,
            version_spans=[
                version_pb2.VersionSpan(version=span.version.to_proto(), start=span.start, end=span.end)
                for span in sample.spans
            ],
        )


def scored_parts(groups: Iterable[RolloutGroup]) -> Iterator[list[pb.ScoredSequence]]:
    """Every sample as a sequence that a gang is to say something of, about two mebibytes at a time.

    Each takes its prompt along, so long prompts with many short answers are far larger here than as groups.
    """
    part: list[pb.ScoredSequence] = []
    size = 0
    for group in groups:
        prompt = to_tensor(group.prompt_token_ids)
        for sample in group.samples:
            part.append(
                pb.ScoredSequence(
                    sequence_id=sample.sample_id,
                    prompt_token_ids=prompt,
                    token_ids=to_tensor(sample.token_ids),
                )
            )
            size += group.prompt_token_ids.nbytes + sample.token_ids.nbytes
            if size >= PART_BYTES:
                yield part
                part, size = [], 0
    if part:
        yield part


def _column(numbers: np.ndarray | None) -> tensor_pb2.Tensor | None:
    return None if numbers is None else to_tensor(numbers)
