"""A sample that decodes, and who wrote what of it: kept here where the engine does not say so itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from flotilla_core.version import Version
from flotilla_generator.engine.base import SampleSlot, Span


@dataclass(eq=False)
class Running:
    """Where it is, and since which token each version writes."""

    engine_id: str
    slot: SampleSlot
    tokens_left: int
    starts: list[tuple[Version | None, int]]
    token_ids: list[int] = field(default_factory=list)

    def switch(self, version: Version) -> None:
        """From here on `version` writes."""
        position = len(self.token_ids)
        if self.starts[-1][1] == position:
            self.starts.pop()
        self.starts.append((version, position))

    def spans(self) -> tuple[Span, ...]:
        """The switches as spans."""
        ends = [start for _, start in self.starts[1:]] + [len(self.token_ids)]
        return tuple(
            Span(version, start, end)
            for (version, start), end in zip(self.starts, ends, strict=True)
            if end > start
        )
