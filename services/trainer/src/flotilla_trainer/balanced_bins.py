"""Dealing sequences out to micro-batches of packed rows, so that all cost about the same.

Invariants: a bin never holds more than the budget unless it is one single longer sequence; there are as few bins as
first-fit in descending order needs, rounded up to the ranks, so that balance never costs a further micro-batch.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bins = list[list[int]]


def balanced_bins(lengths: Ints, costs: NDArray[np.float64], budget: int, ranks: int) -> Bins:
    """Indices of the sequences of each bin, in an order in which `ranks` neighbours cost alike."""
    order = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    fitted = _first_fit(order, sizes, budget)
    count = min(-(-len(fitted) // ranks) * ranks, len(order))
    bins = _cheapest_first(order, sizes, costs.tolist(), budget, count) or fitted
    return sorted(bins, key=lambda members: -costs[members].sum())


def _first_fit(order: list[int], sizes: list[int], budget: int) -> Bins:
    """Each sequence into the first bin with room; a tree of the largest room below each node finds it."""
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
    """Each sequence into the cheapest bin with room; None when at last one finds no room."""
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
