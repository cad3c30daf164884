"""Ledger rows as the wire shows them."""

from __future__ import annotations

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import SampleRecord, SampleState
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import to_tensor

DEFAULT_LIMIT = 100


async def list_samples(ledger: Ledger, run_id: str, request: pb.ListSamplesRequest) -> pb.ListSamplesResponse:
    """One page of samples."""
    limit = request.limit or DEFAULT_LIMIT
    records = await ledger.samples(
        run_id,
        step=request.step if request.HasField("step") else None,
        state=SampleState(request.state) if request.state else None,
        limit=limit,
        after=_position(request.page_token),
    )
    token = str(records[-1].position) if len(records) == limit else ""
    return pb.ListSamplesResponse(samples=[_message(record) for record in records], next_page_token=token)


def _position(page_token: str) -> int:
    if page_token and not page_token.isdecimal():
        raise InvalidRequest(f"page_token {page_token!r} is not one that an earlier page returned")
    return int(page_token or 0)


def _message(record: SampleRecord) -> pb.Sample:
    message = pb.Sample(
        sample_id=record.sample_id,
        state=pb.SampleState.ValueType(int(record.state)),
        attempt=record.attempt,
        step=record.step,
        generator_id=record.generator,
        reward=record.reward or 0.0,
        drop_reason=record.drop_reason,
        update_id=record.update_id,
        prompt=record.prompt_text,
        response=record.text,
    )
    if record.token_ids is not None:
        message.token_ids.CopyFrom(to_tensor(record.token_ids))
    if record.logprobs is not None:
        message.logprobs.CopyFrom(to_tensor(record.logprobs))
    for span in record.spans:
        message.version_spans.add(version=span.version.to_proto(), start=span.start, end=span.end)
    return message
