"""Cutting sequences into padded rows: micro-batches of neighbours in length.

Invariant: a cut never holds more than the budget, padding included, unless it is one single longer sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def length_cuts(descending: Ints, budget: int, ranks: int) -> list[int]:
    """Cuts within `budget`, as few as the budget allows rounded up to the ranks, and evened out."""
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
    """Edges where rows of a micro-batch are as wide as its first, which is the longest."""
    edges = [0]
    while edges[-1] < len(descending):
        rows = max(1, budget // int(descending[edges[-1]]))
        edges.append(min(edges[-1] + rows, len(descending)))
    return edges
