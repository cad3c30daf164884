"""Groups of two answers each, the chosen one first, and what makes no pair of the second group."""

from __future__ import annotations

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.tensors import to_tensor


def make_pairs(count: int, vocabulary: int, *, masked: bool = False) -> list[pb.TrainGroup]:
    """Prompts and answers of unequal lengths; where `masked`, every third chosen answer is so in part."""
    rng = np.random.default_rng(0)
    groups = []
    for index in range(count):
        prompt = rng.integers(0, vocabulary, rng.integers(1, 6)).astype(np.int32)
        group = pb.TrainGroup(group_id=f"g{index}", prompt_token_ids=to_tensor(prompt))
        for number in range(2):
            answer = rng.integers(0, vocabulary, rng.integers(1, 20)).astype(np.int32)
            sample = group.samples.add(sample_id=f"g{index}/{number}", token_ids=to_tensor(answer))
            if masked and index % 3 == 0 and number == 0:
                sample.mask.CopyFrom(to_tensor(np.arange(len(answer)) % 2 == 0))
        groups.append(group)
    return groups


def lone_sample(groups: list[pb.TrainGroup]) -> None:
    del groups[1].samples[1]


def equal_answers(groups: list[pb.TrainGroup]) -> None:
    groups[1].samples[1].token_ids.CopyFrom(groups[1].samples[0].token_ids)
