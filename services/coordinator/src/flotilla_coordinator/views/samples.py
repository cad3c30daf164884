"""Answers which samples a run has, and what became of each.

Invariants: the ledger says which there are, and how each was judged. What it never holds (the row's answer and other
columns), and what it has pruned of a sample, comes from the file of its step in the run directory. What that file says
of a sample that was issued again belongs to an attempt that was undone, and does not count. A dropped sample is in no
file: its row's columns come from another sample of its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla_coordinator.ledger import sample_queries
from flotilla_coordinator.ledger.records import SampleRecord, SampleState
from flotilla_coordinator.ledger.schema import connect_read_only
from flotilla_coordinator.ledger.verdicts import named_parts
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version

DEFAULT_LIMIT = 100


def list_samples(
    ledger: Path, run_id: str, directory: RunDirectory, request: pb.ListSamplesRequest
) -> pb.ListSamplesResponse:
    """Return one page of the samples that the request chooses."""
    limit = request.limit or DEFAULT_LIMIT
    with closing(connect_read_only(ledger)) as db:
        records = sample_queries.samples(
            db,
            run_id,
            request.step if request.HasField("step") else None,
            SampleState(request.state) if request.state else None,
            limit,
            _position(request.page_token),
        )
    messages = not request.without_messages
    page = pb.ListSamplesResponse(samples=(_message(record, messages=messages) for record in records))
    complete(page, directory)
    if len(records) == limit:
        page.next_page_token = str(records[-1].position)
    return page


def complete(page: pb.ListSamplesResponse, directory: RunDirectory) -> None:
    """Add what the files of their steps say of the samples."""
    answered = {one.sample_id: one for one in page.samples if one.state != pb.SAMPLE_STATE_ISSUED}
    dropped: dict[str, list[pb.Sample]] = {}
    for one in answered.values():
        if one.state == pb.SAMPLE_STATE_DROPPED:
            dropped.setdefault(one.sample_id.rpartition("/")[0], []).append(one)
    for recorded in directory.read_samples({one.step for one in answered.values()}):
        for one in dropped.pop(recorded["sample_id"].rpartition("/")[0], ()):
            _add_row(one, recorded)
        sample = answered.get(recorded["sample_id"])
        if sample is not None and not _is_undone(sample, recorded):
            _add_recorded(sample, recorded)


def _is_undone(sample: pb.Sample, recorded: dict[str, Any]) -> bool:
    """Return whether the file speaks of an attempt before this one; what comes after a fall-back has a new lineage."""
    versions = [Version.from_proto(span.version) for span in sample.version_spans]
    return bool(versions) and versions != [
        Version.parse(span["version"]) for span in recorded["policy_versions"]
    ]


def _add_row(sample: pb.Sample, recorded: dict[str, Any]) -> None:
    # A file of an earlier release lacks some of them.
    if (answer := recorded.get("answer")) is not None:
        sample.answer = answer
    if (info := recorded.get("info")) is not None:
        sample.info_json = json.dumps(info, ensure_ascii=False)


def _add_recorded(sample: pb.Sample, recorded: dict[str, Any]) -> None:
    _add_row(sample, recorded)
    # The ledger has them with the verdicts, but not of samples of an earlier release.
    if (parts := recorded.get("reward_parts")) is not None and not sample.verdicts:
        _add_parts(sample, ((part["reward"], part["value"]) for part in parts))
    if sample.version_spans:
        return
    sample.prompt, sample.response = recorded["prompt"], recorded["response"]
    for span in recorded["policy_versions"]:
        version = Version.parse(span["version"]).to_proto()
        sample.version_spans.add(version=version, start=span["start"], end=span["end"])


def _position(page_token: str) -> int:
    if page_token and not page_token.isdecimal():
        raise InvalidRequest(f"page_token {page_token!r} is not one that an earlier page returned")
    return int(page_token or 0)


def _message(record: SampleRecord, *, messages: bool) -> pb.Sample:
    message = pb.Sample(
        sample_id=record.sample_id,
        state=pb.SampleState.ValueType(int(record.state)),
        attempt=record.attempt,
        step=record.step,
        generator_id=record.generator,
        reward=record.reward,
        drop_reason=record.drop_reason,
        update_id=record.update_id,
        prompt=record.prompt_text,
        response=record.text,
        prompt_tokens=0 if record.prompt_token_ids is None else len(record.prompt_token_ids),
        truncated=record.truncated,
    )
    if record.token_ids is not None:
        message.token_ids.CopyFrom(to_tensor(record.token_ids))
    if record.logprobs is not None:
        message.logprobs.CopyFrom(to_tensor(record.logprobs))
    for span in record.spans:
        message.version_spans.add(version=span.version.to_proto(), start=span.start, end=span.end)
    for verdict in record.verdicts:
        message.verdicts.add(**{field.name: getattr(verdict, field.name) for field in fields(verdict)})
    if parts := [*named_parts(record.verdicts)]:
        _add_parts(message, parts)
    if (episode := record.episode) is not None:
        message.episode.CopyFrom(
            pb.EpisodeShown(
                ending=episode.ending,
                turns=episode.turns,
                turn_rewards=episode.turn_rewards,
                branches=len(episode.branches),
                messages_json=episode.messages if messages else "",
            )
        )
    return message


def _add_parts(sample: pb.Sample, parts: Iterable[tuple[str, float]]) -> None:
    sample.reward_parts.SetInParent()
    for reward, value in parts:
        sample.reward_parts.parts.add(reward=reward, value=value)
