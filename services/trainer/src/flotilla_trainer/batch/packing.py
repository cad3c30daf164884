"""Lay the sequences of an update out in micro-batches, balanced over ranks or groups of ranks.

Invariants: every sequence is in exactly one micro-batch and every scored token is scored once; a micro-batch has at
most `budget` tokens, padding included, unless it is one single longer sequence; all ranks get equally many
micro-batches, some of them idle, so that their collectives match. The layout of an update never changes its result:
only sums leave a micro-batch.

Packed rows are balanced so that all cost about the same. There are as few bins as first-fit in descending order needs,
rounded up to the ranks, so that balance never costs another micro-batch. Padded rows hold sequences of similar length.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_trainer.wire.frames import Array

Ints = NDArray[np.int64]
NOTHING = np.zeros(0, np.int64)

Bins = list[list[int]]


@dataclass(frozen=True)
class Layout:
    """The settings that decide how an update is laid out."""

    budget: int
    """The most tokens of one micro-batch."""
    ranks: int
    packed: bool = False
    """True puts sequences one after the other in one row; False gives each a padded row of its own."""
    crossover_tokens: float = float("inf")
    """The length at which the attention of a sequence costs as much as the rest of the model."""

    def costs(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the work for sequences of these lengths, in tokens of linear work."""
        return lengths * (1 + lengths / self.crossover_tokens)


@dataclass(frozen=True)
class Sequences:
    """Whole sequences, prompt and response joined, and the tokens in them that are scored."""

    tokens: NDArray[np.int32]
    """All sequences one after the other."""
    lengths: Ints
    scored: Ints
    """Indices into `tokens`, ascending; never the first token of a sequence, which nothing predicts."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Data of the scored tokens, one row for each: numbers such as advantages, or ids of other tokens."""

    @property
    def starts(self) -> Ints:
        """The index of the first token of each sequence."""
        return np.cumsum(self.lengths) - self.lengths

    def between(self, first: int, last: int) -> Sequences:
        """Return the sequences from `first` up to, but not including, `last`."""
        edges = np.concatenate([[0], np.cumsum(self.lengths)])
        begin, end = edges[first], edges[last]
        inside = (self.scored >= begin) & (self.scored < end)
        return Sequences(
            tokens=self.tokens[begin:end],
            lengths=self.lengths[first:last],
            scored=self.scored[inside] - begin,
            columns={name: column[inside] for name, column in self.columns.items()},
        )


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank: the rows and the tokens scored in them."""

    tokens: NDArray[np.int32]
    """Token ids, [rows, width]; padded on the right, or one packed row."""
    positions: Ints
    """Indices into the flattened rows of the hidden states that predict the scored tokens."""
    targets: NDArray[np.int32]
    columns: dict[str, NDArray[Any]]
    places: Ints
    """Index of each scored token within the update."""
    packed_lengths: Ints
    """Lengths of the sequences of a packed row; empty for padded rows."""
    sequence_tokens: int
    """The number of tokens without padding."""
    idle: bool = False

    def arrays(self, index: int) -> dict[str, Array]:
        """Return the arrays that a rank needs, under names that keep micro-batches apart."""
        named: dict[str, Array] = {
            "tokens": self.tokens,
            "positions": self.positions,
            "targets": self.targets,
        }
        if self.packed_lengths.size:
            named["packed_lengths"] = self.packed_lengths
        return {f"{index}/{name}": array for name, array in (named | self.columns).items()}


def pack(sequences: Sequences, layout: Layout) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank; the ranks walk their lists in step."""
    starts = sequences.starts
    owner = np.searchsorted(starts, sequences.scored, side="right") - 1
    per_sequence = np.bincount(owner, minlength=len(starts))
    first_scored = np.cumsum(per_sequence) - per_sequence

    batches = [
        _micro_batch(sequences, rows, starts[rows], first_scored[rows], per_sequence[rows], layout.packed)
        for rows in _divided(sequences.lengths - 1, layout)
    ]
    while len(batches) % layout.ranks:
        batches.append(_idle(sequences, layout.packed))
    return [batches[rank :: layout.ranks] for rank in range(layout.ranks)]


def fed_tokens(per_rank: list[list[MicroBatch]]) -> int:
    """Count the tokens that the forward passes see, padding included."""
    return sum(batch.tokens.size for batches in per_rank for batch in batches)


def padding_share(per_rank: list[list[MicroBatch]]) -> float:
    """Return the share of the fed tokens that belong to no sequence."""
    wanted = sum(batch.sequence_tokens for batches in per_rank for batch in batches)
    return 1.0 - wanted / fed_tokens(per_rank)


def _divided(lengths: Ints, layout: Layout) -> list[Ints]:
    """Return the sequences of each micro-batch, the longest first."""
    if layout.packed:
        bins = balanced_bins(lengths, layout.costs(lengths), layout.budget, layout.ranks)
        return [np.array(members) for members in bins]
    order = np.argsort(-lengths, kind="stable")
    cuts = length_cuts(lengths[order], layout.budget, layout.ranks)
    return [order[begin:end] for begin, end in pairwise(cuts)]


def _micro_batch(
    sequences: Sequences, rows: Ints, starts: Ints, first_scored: Ints, counts: Ints, packed: bool
) -> MicroBatch:
    lengths = sequences.lengths[rows] - 1  # nothing follows the last token, so it is not fed
    columns = np.arange(lengths[0])
    inside = columns < lengths[:, None]
    fed = sequences.tokens[(starts[:, None] + columns)[inside]]
    if packed:
        tokens, row_starts = fed[None], np.cumsum(lengths) - lengths
    else:
        tokens, row_starts = np.zeros(inside.shape, np.int32), np.arange(len(rows)) * lengths[0]
        tokens[inside] = fed

    row_of = np.repeat(np.arange(len(rows)), counts)
    within_row = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = first_scored[row_of] + within_row
    scored = sequences.scored[places]
    return MicroBatch(
        tokens=tokens,
        positions=row_starts[row_of] + scored - starts[row_of] - 1,
        targets=sequences.tokens[scored],
        columns={name: column[places] for name, column in sequences.columns.items()},
        places=places,
        packed_lengths=lengths if packed else NOTHING,
        sequence_tokens=len(fed),
    )


def _idle(sequences: Sequences, packed: bool) -> MicroBatch:
    """Return work of weight zero for a rank that would otherwise be missing from the collectives."""
    tokens = np.zeros((1, 2), np.int32)
    return MicroBatch(
        tokens=tokens,
        positions=np.zeros(1, np.int64),
        targets=np.zeros(1, np.int32),
        columns={
            name: np.zeros((1, *column.shape[1:]), column.dtype) for name, column in sequences.columns.items()
        },
        places=NOTHING,
        packed_lengths=np.array([tokens.size]) if packed else NOTHING,
        sequence_tokens=0,
        idle=True,
    )


def balanced_bins(lengths: Ints, costs: NDArray[np.float64], budget: int, ranks: int) -> Bins:
    """Return the indices of the sequences of each bin; `ranks` consecutive bins cost about the same."""
    order = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    fitted = _first_fit(order, sizes, budget)
    count = min(-(-len(fitted) // ranks) * ranks, len(order))
    bins = _cheapest_first(order, sizes, costs.tolist(), budget, count) or fitted
    return sorted(bins, key=lambda members: -costs[members].sum())


def _first_fit(order: list[int], sizes: list[int], budget: int) -> Bins:
    """Put each sequence into the first bin with room; a tree of the largest room below each node finds it."""
    leaves = 1 << max(1, (len(order) - 1).bit_length())
    room = [budget] * (2 * leaves)
    bins: Bins = []
    for index in order:
        size = min(sizes[index], budget)
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < size)
        room[node] -= size
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _cheapest_first(
    order: list[int], sizes: list[int], costs: list[float], budget: int, count: int
) -> Bins | None:
    """Put each sequence into the cheapest bin with room; return None when a sequence finds no room."""
    bins: Bins = [[] for _ in range(count)]
    room = [budget] * count
    heap = [(0.0, number) for number in range(count)]
    for index in order:
        size = min(sizes[index], budget)
        full = []
        while heap and room[heap[0][1]] < size:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, number = heap[0]
        bins[number].append(index)
        room[number] -= size
        heapq.heapreplace(heap, (cost + costs[index], number))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def length_cuts(descending: Ints, budget: int, ranks: int) -> list[int]:
    """Return even cuts within `budget`: as few micro-batches as the budget allows, rounded up to the ranks."""
    cuts = _greedy(descending, budget)
    target = -(-(len(cuts) - 1) // ranks) * ranks
    # The smallest budget that still needs no more than `target` micro-batches spreads the work evenly.
    low, high = min(budget, max(1, int(descending.sum()) // target)), budget
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(descending, middle)) - 1 <= target:
            high = middle
        else:
            low = middle + 1
    return _greedy(descending, low)


def _greedy(descending: Ints, budget: int) -> list[int]:
    """Return the edges of micro-batches whose rows are as wide as their first, which is the longest."""
    edges = [0]
    while edges[-1] < len(descending):
        rows = max(1, budget // int(descending[edges[-1]]))
        edges.append(min(edges[-1] + rows, len(descending)))
    return edges
