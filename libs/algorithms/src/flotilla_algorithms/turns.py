"""The turns of samples: a run of trained tokens each, up to the next context, the next sequence or the end.

Invariant: turns follow each other in the order of their tokens, sample by sample; each trained token is in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from flotilla_algorithms.outcomes import Floats, Ints, Outcomes


@dataclass(frozen=True)
class Turns:
    """All turns of an update."""

    of_token: Ints
    """The number of the turn of each trained token."""
    first: Ints
    """The first token of each turn, as its place among the trained tokens."""
    counts: Ints
    """The number of turns of each sample."""

    @classmethod
    def of(cls, outcomes: Outcomes) -> Self:
        """Find the turns of all samples."""
        own = outcomes.trained
        begins = np.zeros(own.size, np.bool_) if outcomes.begins is None else outcomes.begins.copy()
        begins[np.cumsum(outcomes.response_lengths) - outcomes.response_lengths] = True
        begins = own & (begins | ~np.concatenate([[False], own[:-1]]))
        return cls(
            of_token=np.cumsum(begins)[own] - 1,
            first=np.flatnonzero(begins[own]),
            counts=outcomes.sample_sums(begins.astype(np.float64)).astype(np.int64),
        )

    @property
    def last(self) -> Ints:
        """The last token of each turn, as its place among the trained tokens."""
        return np.append(self.first[1:], self.of_token.size)[: self.first.size] - 1

    def sums(self, tokens: Floats) -> Floats:
        """Return the sum over the trained tokens of each turn."""
        sums: Floats = np.bincount(self.of_token, tokens, minlength=self.first.size).astype(np.float64)
        return sums

    def to_tokens(self, values: Floats, outcomes: Outcomes) -> Floats:
        """Return a value a turn as one a token; context gets zero."""
        spread = np.zeros(outcomes.trained.size)
        spread[outcomes.trained] = values[self.of_token]
        return spread
