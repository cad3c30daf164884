"""Groups of an update are those that were sent, however they were cut into messages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import to_tensor
from flotilla_trainer.front.servicer import read_groups

PROMPT = to_tensor(np.array([1, 2], np.int32))


def piece(group: str, *samples: str, prompt: bool = False) -> pb.TrainGroup:
    made = pb.TrainGroup(group_id=group, prompt_token_ids=PROMPT if prompt else None)
    for sample in samples:
        made.samples.add(sample_id=f"{group}/{sample}")
    return made


async def sent(*chunks: list[pb.TrainGroup]) -> AsyncIterator[pb.TrainRequest]:
    for groups in chunks:
        yield pb.TrainRequest(chunk=pb.TrainChunk(groups=groups))


async def test_a_group_that_came_in_pieces_is_whole() -> None:
    whole = [
        piece("a", "0", prompt=True),
        piece("b", "0", "1", "2", "3", prompt=True),
        piece("c", prompt=True),
    ]
    cut = sent(
        [whole[0], piece("b", "0", prompt=True)],
        [piece("b", "1", "2")],
        [piece("b", "3"), whole[2]],
    )
    assert await read_groups(cut) == whole


async def test_groups_with_a_prompt_each_stay_apart_whatever_they_are_called() -> None:
    groups = [piece("", "0", prompt=True), piece("", "1", prompt=True), piece("a", prompt=True)]
    assert await read_groups(sent([*groups, groups[2]])) == [*groups, groups[2]]


async def test_what_is_no_chunk_is_refused() -> None:
    async def header() -> AsyncIterator[pb.TrainRequest]:
        yield pb.TrainRequest(header=pb.TrainHeader(update_id="u"))

    with pytest.raises(InvalidRequest, match="chunks of groups"):
        await read_groups(header())
