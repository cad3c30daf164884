"""What an evaluation found.

Invariants: accuracy is the share of all answers that are right; pass@k is the unbiased estimate of how often at least
one of k answers to a prompt is right, from all answers that were drawn, so k is never above their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Evaluation:
    """One number that runs are steered by, and what else was measured on the way."""

    accuracy: float
    metrics: dict[str, float] = field(default_factory=dict)
    """By the names under which they are recorded."""

    @classmethod
    def of_answers(cls, right: Sequence[int], drawn: int) -> Evaluation:
        """So many right ones among the answers to each prompt, `drawn` each."""
        accuracy = sum(right) / (len(right) * drawn)
        if drawn == 1:
            return cls(accuracy)
        sizes = [1 << power for power in range(drawn.bit_length())]
        passes = {f"eval/pass@{k}": sum(pass_at(k, c, drawn) for c in right) / len(right) for k in sizes}
        return cls(accuracy, {f"eval/mean@{drawn}": accuracy, **passes})


def pass_at(k: int, right: int, drawn: int) -> float:
    """Share of all teams of k among the drawn answers that hold a right one."""
    return 1.0 - math.comb(drawn - right, k) / math.comb(drawn, k)
