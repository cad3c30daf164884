"""The messages of an update: a header, then groups in chunks.

Invariant: a group is whole again where it came in pieces.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import InvalidRequest


async def read_header(requests: AsyncIterator[pb.TrainRequest]) -> pb.TrainHeader:
    """The first message."""
    async for request in requests:
        if request.WhichOneof("part") == "header" and request.header.update_id:
            return request.header
        break
    raise InvalidRequest("an update starts with a header that names it", where="Train")


async def read_groups(requests: AsyncIterator[pb.TrainRequest]) -> list[pb.TrainGroup]:
    """Whole groups, each put together from the pieces that it came in."""
    groups: list[pb.TrainGroup] = []
    async for request in requests:
        for group in _chunk(request).groups:
            goes_on = bool(groups and group.group_id) and group.group_id == groups[-1].group_id
            if goes_on and not group.prompt_token_ids.data:
                groups[-1].samples.MergeFrom(group.samples)
            else:
                groups.append(group)
    return groups


def _chunk(request: pb.TrainRequest) -> pb.TrainChunk:
    if request.WhichOneof("part") != "chunk":
        raise InvalidRequest("after the header come chunks of groups", where="Train")
    return request.chunk
