"""What a generator delivers is looked at before anything is made of it.

Invariants: a sample that nobody waits for, that an older version than the one asked for wrote, or that cannot be read
never gets further than here; each one is counted and logged, and its slot is issued again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

import numpy as np
import structlog

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
    versions = [Version.from_proto(span.version) for span in sample.version_spans]
    if versions and min(versions) < oldest:
        return STALE, f"version {min(versions)} wrote some of it, and {oldest} was asked for"
    try:
        tokens, logprobs = from_tensor(sample.token_ids), from_tensor(sample.logprobs)
    except FlotillaError as error:
        return UNREADABLE, str(error)
    if len(tokens) != len(logprobs):
        return UNREADABLE, f"it has {len(tokens)} tokens and {len(logprobs)} log-probabilities"
    if not np.isfinite(logprobs).all():
        return UNREADABLE, "a log-probability is not finite"
    return "", ""
