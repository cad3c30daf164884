"""One sample of the simulated engine: how long it will be, who writes it, and how it ended."""

from __future__ import annotations

import time

from flotilla_core.config.generators import LatencyConfig
from flotilla_core.version import Version
from flotilla_generator.engine.base import SampleSlot, Span


class Decoding:
    """A sample from the moment it was asked for."""

    def __init__(self, slot: SampleSlot, length: int, latency: LatencyConfig) -> None:
        self.slot = slot
        self.length = length
        self.starts: list[tuple[Version | None, int]] = []
        """The versions that write it, each with the number of its first token; empty before the sample has begun."""
        self.asked = self.started = time.monotonic()
        self.cut = False
        """True where it ends before its time."""
        self._latency = latency

    @property
    def seconds(self) -> float:
        """The time that decoding takes."""
        return self._latency.time_to_first_token_s + (self.length - 1) * self._latency.seconds_per_token

    def begin(self, version: Version | None) -> None:
        """Mark the sample as decoding from now on."""
        self.starts.append((version, 0))
        self.started = time.monotonic()

    def go_on_under(self, version: Version) -> None:
        """Another version writes from the next token on; one that has not begun is left to its beginning."""
        if self.starts:
            self.starts.append((version, self.written()))

    def written(self) -> int:
        """Tokens that exist by now."""
        if not self.starts:
            return 0
        elapsed = time.monotonic() - self.started - self._latency.time_to_first_token_s
        if elapsed < 0:
            return 0
        if self._latency.seconds_per_token == 0:
            return self.length
        return min(self.length, 1 + int(elapsed / self._latency.seconds_per_token))

    def spans(self, length: int) -> tuple[Span, ...]:
        """Return the versions that wrote the first `length` tokens."""
        spans: list[Span] = []
        end = length
        for version, start in reversed(self.starts):
            if start < end:
                spans.append(Span(version, start, end))
                end = start
        return tuple(reversed(spans))
