"""What a generator delivers is looked at before anything is made of it.

Invariants: a sample that nobody waits for, that an older version than the one asked for wrote, that says of some token
no version, or that cannot be read never gets further than here; each one is counted and logged, and its slot is issued
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

import numpy as np
import structlog

from flotilla.common.v1 import version_pb2
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_core.errors import FlotillaError, Mismatch
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version

log = structlog.get_logger(__name__)

UNASKED, STALE, UNREADABLE = "unasked", "stale", "unreadable"


class SampleDoor:
    """Counts whom it refuses."""

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()

    def refusal(
        self, sample: gen.GeneratedSample, awaited: Container[str], oldest: Version, generator: str
    ) -> Mismatch | None:
        """Why a sample is refused; None where it may come in."""
        kind, why = _fault(sample, awaited, oldest)
        if not kind:
            return None
        self._refused[kind] += 1
        log.warning("sample refused", sample_id=sample.sample_id, generator=generator, why=why)
        return Mismatch(
            f"a sample of {generator} was refused",
            where=sample.sample_id,
            why=why,
            next_step=f"see `flotilla logs {generator}`",
        )

    def take_metrics(self) -> dict[str, float]:
        """What was refused since the last time, in all and by kind."""
        refused, self._refused = self._refused, Counter()
        by_kind = {f"samples/rejected_{kind}": float(count) for kind, count in refused.items()}
        return {"samples/rejected": float(refused.total()), **by_kind}


def _fault(sample: gen.GeneratedSample, awaited: Container[str], oldest: Version) -> tuple[str, str]:
    """What kind of fault, and what it is; two empty texts where there is none."""
    if sample.sample_id not in awaited:
        return UNASKED, "nobody waits for it: it was never asked for, or it came before"
    if why := _unreadable(sample):
        return UNREADABLE, why
    version = min((Version.from_proto(span.version) for span in sample.version_spans), default=oldest)
    if version < oldest:
        return STALE, f"version {version} wrote some of it, and {oldest} was asked for"
    return "", ""


def _unreadable(sample: gen.GeneratedSample) -> str:
    """Why nothing can be learned from it; empty where something can."""
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
    """Whether the spans follow each other from the first token to the last, each of a version."""
    end = 0
    for span in spans:
        if span.start != end or not span.HasField("version"):
            return False
        end = span.end
    return end == tokens
