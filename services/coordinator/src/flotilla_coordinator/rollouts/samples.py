"""Checks the samples that generators deliver, joins their pieces, and reads those that a repeated step has already.

Invariants: a sample is rejected here if it was not requested, if a version older than the requested one generated a
part of it, if a token has no version, or if it cannot be read. Each rejection is counted and logged, and the slot is
issued again. Each token keeps the log-probability and the version with which it was generated. A piece is generated
after all pieces before it, with a seed of its own, because the first piece's seed would repeat the same numbers. A
recorded sample that was scored is never generated again; one that was dropped for a reason of its own stays dropped,
and counts as a failure of its reward where it was one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from flotilla.common.v1 import version_pb2
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import (
    REWARD_FAILURES,
    DropReason,
    FinishedSample,
    SampleRecord,
    SampleState,
    TokenSpan,
)
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_core import ids
from flotilla_core.errors import FlotillaError, Mismatch
from flotilla_core.logger import get_logger
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version

log = get_logger(__name__)

UNASKED, STALE, UNREADABLE = "unasked", "stale", "unreadable"

MOST_SAMPLES = 1 << 30
KEPT = tuple(field.name for field in fields(FinishedSample))
"""Fields of a scored sample that the ledger holds under the same names."""
TIMEOUTS = (DropReason.REWARD_TIMEOUT, DropReason.ENVIRONMENT_TIMEOUT)
FINAL = (SampleState.SCORED, SampleState.DROPPED)


@dataclass
class PartialSample:
    """A sample in pieces, in order, from the generators that each wrote a part of it."""

    sample_id: str
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[TokenSpan] = field(default_factory=list)
    instance_ids: set[str] = field(default_factory=set)
    generator_s: float = 0.0

    def add(self, piece: gen.GeneratedSample, instance_id: str, most_tokens: int) -> None:
        """Add the next piece; one that leaves no room for a last piece is drawn again."""
        if len(self.token_ids) + len(from_tensor(piece.token_ids)) < most_tokens:
            self._append(piece, instance_id)

    def slot(self, run_seed: int) -> gen.SampleSlot:
        """Return the slot that a generator must fill."""
        written = len(self.token_ids)
        if not written:
            return gen.SampleSlot(sample_id=self.sample_id, seed=ids.sample_seed(run_seed, self.sample_id))
        return gen.SampleSlot(
            sample_id=self.sample_id,
            seed=ids.sample_seed(run_seed, f"{self.sample_id}/from/{written}"),
            prefix_token_ids=to_tensor(self.token_ids),
        )

    def whole(
        self, last: gen.GeneratedSample, generator: str, instance_id: str, attempt: int
    ) -> RolloutSample:
        """Return the response with its last piece, still without its text and without a reward."""
        self._append(last, instance_id)
        return RolloutSample(
            sample_id=self.sample_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text="",
            spans=tuple(self.spans),
            truncated=last.finish_reason == gen.FINISH_REASON_LENGTH,
            generator=generator,
            attempt=attempt,
            instance_ids=frozenset(self.instance_ids),
            generator_s=self.generator_s,
        )

    def _append(self, piece: gen.GeneratedSample, instance_id: str) -> None:
        self.instance_ids.add(instance_id)
        self.generator_s += piece.timing.total.ToNanoseconds() / 1e9
        written = len(self.token_ids)
        self.spans += (
            TokenSpan(Version.from_proto(span.version), written + span.start, written + span.end)
            for span in piece.version_spans
        )
        self.token_ids = np.concatenate([self.token_ids, from_tensor(piece.token_ids)])
        self.logprobs = np.concatenate([self.logprobs, from_tensor(piece.logprobs)])


class SampleValidator:
    """Checks what generators deliver before it is used, and counts what it rejects."""

    def __init__(self) -> None:
        self._rejected: Counter[str] = Counter()

    def reject_reason(
        self, sample: gen.GeneratedSample, awaited: Container[str], oldest: Version, generator: str
    ) -> Mismatch | None:
        """Return why a sample is rejected, or None where it is accepted."""
        kind, why = _fault(sample, awaited, oldest)
        if not kind:
            return None
        self._rejected[kind] += 1
        log.warning("sample refused", sample_id=sample.sample_id, generator=generator, why=why)
        return Mismatch(
            f"a sample of {generator} was refused",
            where=sample.sample_id,
            why=why,
            next_step=f"see `flotilla logs {generator}`",
        )

    def take_metrics(self) -> dict[str, float]:
        """Count what was rejected since the last call, in all and by kind."""
        rejected, self._rejected = self._rejected, Counter()
        by_kind = {f"samples/rejected_{kind}": float(count) for kind, count in rejected.items()}
        return {"samples/rejected": float(rejected.total()), **by_kind}


def _fault(sample: gen.GeneratedSample, awaited: Container[str], oldest: Version) -> tuple[str, str]:
    """Return the kind of the fault and its description; both are empty where there is none."""
    if sample.sample_id not in awaited:
        return UNASKED, "it was never requested, or it was delivered before"
    if why := _unreadable(sample):
        return UNREADABLE, why
    version = min((Version.from_proto(span.version) for span in sample.version_spans), default=oldest)
    if version < oldest:
        return STALE, f"version {version} wrote some of it, and {oldest} was asked for"
    return "", ""


def _unreadable(sample: gen.GeneratedSample) -> str:
    """Say why the sample cannot be trained; empty where it can."""
    try:
        tokens, logprobs = from_tensor(sample.token_ids), from_tensor(sample.logprobs)
    except FlotillaError as error:
        return str(error)
    if len(tokens) != len(logprobs):
        return f"it has {len(tokens)} tokens and {len(logprobs)} log-probabilities"
    if not np.isfinite(logprobs).all():
        return "a log-probability is not finite"
    if not _cover(sample.version_spans, len(tokens)):
        return "it does not say of each token which version wrote it"
    return ""


def _cover(spans: Iterable[version_pb2.VersionSpan], tokens: int) -> bool:
    """Return whether the spans follow each other from the first token to the last, each with a version."""
    end = 0
    for span in spans:
        if span.start != end or not span.HasField("version"):
            return False
        end = span.end
    return end == tokens


class Replay:
    """The recorded samples of one run."""

    def __init__(self, run_id: str, ledger: Ledger) -> None:
        self._run_id = run_id
        self._ledger = ledger
        self._steps: dict[int, asyncio.Task[dict[str, list[SampleRecord]]]] = {}

    async def group(self, step: int, group_id: str) -> list[SampleRecord]:
        """Return the samples of a group that was admitted before."""
        if step not in self._steps:
            self._steps = {known: task for known, task in self._steps.items() if known >= step - 1}
            self._steps[step] = asyncio.create_task(self._read(step), name=f"replay of step {step}")
        return (await asyncio.shield(self._steps[step]))[group_id]

    async def _read(self, step: int) -> dict[str, list[SampleRecord]]:
        groups: dict[str, list[SampleRecord]] = {}
        for record in await self._ledger.samples(self._run_id, step=step, limit=MOST_SAMPLES):
            groups.setdefault(record.group_id, []).append(record)
        return groups


def decided(records: list[SampleRecord]) -> set[str]:
    """Return the samples that need no generator any more."""
    return {record.sample_id for record in records if record.state in FINAL}


def recorded_samples(records: list[SampleRecord]) -> list[RolloutSample]:
    """Return the samples that may be trained, with their tokens, log-probabilities and rewards."""
    return [
        RolloutSample(**{name: getattr(record, name) for name in KEPT})
        for record in records
        if record.state is SampleState.SCORED and record.token_ids is not None
    ]


def recorded_failures(records: list[SampleRecord]) -> list[Outcome]:
    """Return the failures of the rewards, as far as the ledger knows them."""
    return [
        Outcome(
            None,
            next(
                (one.message for one in reversed(record.verdicts) if one.message),
                f"the reward of {record.sample_id} failed before the run was continued",
            ),
            timed_out=record.drop_reason in TIMEOUTS,
        )
        for record in records
        if record.state is SampleState.DROPPED and record.drop_reason in REWARD_FAILURES
    ]
