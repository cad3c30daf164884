"""Several sequences one after the other in one row, and where each of them lies.

Invariant: positions restart at zero with every sequence, so that a model cannot tell a packed sequence from a lone one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True)
class PackedRow:
    """Borders of the sequences of one row, on the host for shapes and on the device for kernels."""

    lengths: tuple[int, ...]
    borders: torch.Tensor
    """[sequences + 1] where each sequence begins, and the end, as int32."""
    position_ids: torch.Tensor
    """[1, tokens] place of each token within its sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRow:
        """A row of sequences of these lengths."""
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        starts = ends - counts
        places = torch.arange(int(ends[-1])) - starts.repeat_interleave(counts)
        borders = torch.nn.functional.pad(ends, (1, 0)).int()
        return cls(tuple(counts.tolist()), borders.to(device), places[None].to(device))

    @classmethod
    def among(cls, columns: dict[str, torch.Tensor]) -> PackedRow | None:
        """The row that the columns of a micro-batch describe; None where its rows are padded."""
        lengths = columns.get("packed_lengths")
        return None if lengths is None else cls.of(lengths.tolist(), columns["tokens"].device)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbours of equal length as (first token, sequences, length), which one dense call can take together."""
        runs, start = [], 0
        for length, neighbours in groupby(self.lengths):
            count = len(list(neighbours))
            runs.append((start, count, length))
            start += count * length
        return runs
