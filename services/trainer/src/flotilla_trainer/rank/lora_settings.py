"""What the ranks have to know of a session's adapters.

Invariant: made by the front from a checked specification.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraSettings:
    """Size, place and beginning of the adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Ends of the names of linear layers; empty takes every one but the head."""
    adapter: str
    """Folder in the layout of peft; empty starts B at zero."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank
