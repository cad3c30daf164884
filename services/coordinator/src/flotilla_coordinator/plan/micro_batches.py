"""How many micro-batches the trainer cuts an update into.

Invariant: the figure holds for padded and for packed rows, and is what the trainer does when all sequences are as long
as the longest; shorter ones never need more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatches:
    """The arithmetic of one update."""

    sequences: int
    fed_tokens: int
    """Of the longest sequence; its last token predicts nothing and is not fed."""
    together: int
    """Longest sequences that fit the budget; one where not even one does."""
    per_rank: int
    """At most; ranks that are left without a sequence take part with empty work."""

    @classmethod
    def of(cls, sequences: int, longest: int, budget: int, ranks: int) -> MicroBatches:
        """An update of so many sequences of up to `longest` tokens, within `budget` tokens a micro-batch."""
        fed = longest - 1
        together = max(budget // fed, 1)
        return cls(sequences, fed, together, math.ceil(sequences / (together * ranks)))
