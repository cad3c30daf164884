"""Cutting an update into micro-batches that fit a token budget, balanced over the ranks.

Invariants: every sequence is in exactly one micro-batch and every scored token is scored once; a micro-batch has at
most `budget` padded tokens unless it is one single longer sequence; all ranks get equally many micro-batches, so that
their collectives match, idle ones where there is nothing left to do. How an update is cut never changes its result:
only sums leave a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flotilla_trainer.frames import Array

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """Whole sequences, prompt and response joined, and the tokens in them that are scored."""

    tokens: NDArray[np.int32]
    """All sequences one after the other."""
    lengths: Ints
    scored: Ints
    """Places within `tokens`, ascending; never the first token of a sequence, which nothing predicts."""
    columns: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Numbers that belong to the scored tokens, for example advantages."""

    @property
    def starts(self) -> Ints:
        """Where each sequence begins."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank: right-padded rows and what is scored in them."""

    tokens: NDArray[np.int32]
    positions: Ints
    """Places in the flattened rows whose hidden states predict the scored tokens."""
    targets: NDArray[np.int32]
    columns: dict[str, NDArray[np.float32]]
    places: Ints
    """Index of each scored token within the update."""
    idle: bool = False

    def arrays(self, index: int) -> dict[str, Array]:
        """The arrays that a rank needs, under names that keep micro-batches apart."""
        named: dict[str, Array] = {
            "tokens": self.tokens,
            "positions": self.positions,
            "targets": self.targets,
        }
        return {f"{index}/{name}": array for name, array in (named | self.columns).items()}


def pack(sequences: Sequences, budget: int, ranks: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank; ranks walk their lists in step."""
    order = np.argsort(-sequences.lengths, kind="stable")
    edges = _balanced_cuts(sequences.lengths[order] - 1, budget, ranks)
    starts = sequences.starts
    owner = np.searchsorted(starts, sequences.scored, side="right") - 1
    per_sequence = np.bincount(owner, minlength=len(starts))
    first_scored = np.cumsum(per_sequence) - per_sequence

    batches = []
    for begin, end in pairwise(edges):
        rows = order[begin:end]
        batches.append(_micro_batch(sequences, rows, starts[rows], first_scored[rows], per_sequence[rows]))
    while len(batches) % ranks:
        batches.append(_idle(sequences))
    return [batches[rank::ranks] for rank in range(ranks)]


def padded_tokens(per_rank: list[list[MicroBatch]]) -> int:
    """Tokens that the forward passes see, padding included."""
    return sum(batch.tokens.size for batches in per_rank for batch in batches)


def _balanced_cuts(descending: Ints, budget: int, ranks: int) -> list[int]:
    """Cuts within `budget`, as few as the budget allows rounded up to the ranks, and evened out."""
    cuts = _cuts(descending, budget)
    target = -(-(len(cuts) - 1) // ranks) * ranks
    # The smallest budget that still needs no more than `target` micro-batches spreads the work evenly.
    low, high = min(budget, max(1, int(descending.sum()) // target)), budget
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(descending, middle)) - 1 <= target:
            high = middle
        else:
            low = middle + 1
    return _cuts(descending, low)


def _cuts(descending: Ints, budget: int) -> list[int]:
    """Greedy edges: rows of a micro-batch are as wide as its first, which is the longest."""
    edges = [0]
    while edges[-1] < len(descending):
        rows = max(1, budget // int(descending[edges[-1]]))
        edges.append(min(edges[-1] + rows, len(descending)))
    return edges


def _micro_batch(
    sequences: Sequences, rows: Ints, starts: Ints, first_scored: Ints, counts: Ints
) -> MicroBatch:
    lengths = sequences.lengths[rows] - 1  # nothing follows the last token, so it is not fed
    columns = np.arange(lengths[0])
    inside = columns < lengths[:, None]
    tokens = np.zeros(inside.shape, np.int32)
    tokens[inside] = sequences.tokens[(starts[:, None] + columns)[inside]]

    row_of = np.repeat(np.arange(len(rows)), counts)
    within_row = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = first_scored[row_of] + within_row
    scored = sequences.scored[places]
    return MicroBatch(
        tokens=tokens,
        positions=row_of * lengths[0] + scored - starts[row_of] - 1,
        targets=sequences.tokens[scored],
        columns={name: column[places] for name, column in sequences.columns.items()},
        places=places,
    )


def _idle(sequences: Sequences) -> MicroBatch:
    """Work of weight zero for a rank that would otherwise be missing from the collectives."""
    zero = np.zeros(1, np.int32)
    return MicroBatch(
        tokens=np.zeros((1, 2), np.int32),
        positions=np.zeros(1, np.int64),
        targets=zero,
        columns={name: np.zeros(1, np.float32) for name in sequences.columns},
        places=np.zeros(0, np.int64),
        idle=True,
    )
