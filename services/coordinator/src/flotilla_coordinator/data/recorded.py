"""Reads samples that a run recorded, group by group, as prompts that bring their samples with them.

Invariants: a group has one number, also where it is left out; groups are drawn, ordered and resumed like prompts. Every
row is judged before the run starts. A group with fewer samples than the advantage compares is left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np

from flotilla_coordinator.data.prompts import DataSetFacts, Prompt, PromptFile
from flotilla_coordinator.data.recorded_judgement import Conditions, Judged, judged
from flotilla_coordinator.data.recorded_rows import prompt_of
from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_data.formats import no_rows
from flotilla_data.rows import BYTES_AT_ONCE, ROWS_AT_ONCE, Row, Rows, open_rows
from flotilla_data.tokenizer import Tokenizer


def load_recorded(
    source: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    copies: Path | None,
    *,
    temperature: float,
    least_samples: int,
    greedy: bool,
    reward_terms: int = 0,
    states: bool = False,
) -> PromptFile:
    """Read the recorded samples of a data set; `copies` is where files are unpacked to."""
    conditions = Conditions(
        temperature,
        least_samples,
        greedy,
        reward_terms,
        states,
        config.max_prompt_tokens,
        tokenizer.digest,
        tokenizer.vocabulary_size,
    )
    groups = open_recorded(source, config.split, copies, conditions)
    if not groups.kept:
        raise InvalidConfig(
            f"no group has {least_samples} samples or more",
            where=str(source),
            why="the algorithm compares so many samples of a prompt",
            next_step="take an advantage that compares over the whole batch",
        )
    return groups


def open_recorded(
    source: Path, split: str, copies: Path | None = None, conditions: Conditions | None = None
) -> RecordedGroups:
    """Open recorded samples; without `conditions` for another use than training."""
    rows = open_rows(source, split, copies)
    if not len(rows):
        raise no_rows(source)
    return RecordedGroups(rows, judged(rows, conditions), conditions)


class RecordedGroups(PromptFile):
    """Recorded groups, which stay in their files until they are drawn."""

    streamed = True

    def __init__(self, rows: Rows, judged: Judged, conditions: Conditions | None) -> None:
        digest = "" if conditions is None else conditions.tokenizer
        identity = blake2b(f"{rows.digest} recorded {digest}".encode(), digest_size=16).hexdigest()
        super().__init__((), about=DataSetFacts(digests=rows.digests, identity=identity))
        self._source = rows
        self._judged = judged
        self._least = 1 if conditions is None else conditions.least_samples

    @property
    def rows(self) -> int:
        """The number of groups, with those that are left out."""
        return len(self._judged.starts) - 1

    @property
    def kept(self) -> int:
        """The number of groups with as many samples as the advantage compares."""
        return int((np.diff(self._judged.starts) >= self._least).sum())

    @property
    def longest_prompt(self) -> int:
        """The most tokens that a prompt has."""
        return self._judged.longest_prompt

    @property
    def longest_brought(self) -> int:
        """The tokens of the longest sequence."""
        return self._judged.longest_sequence

    @property
    def remarks(self) -> Iterator[str]:
        """Say how many groups are left out."""
        if small := self.rows - self.kept:
            yield (
                f"{small:,} of {self.rows:,} recorded groups of {self._source.source} are left out: they have fewer "
                f"than the {self._least} samples that the advantage compares"
            )

    def size(self, number: int) -> int:
        """Return the number of samples of a group."""
        return len(self._rows_of(number))

    def read(self, numbers: Sequence[int]) -> list[Prompt | None]:
        """Return these groups; None for those that are left out."""
        found = {number: prompt_of(number, rows) for number, rows in self.written(self._kept_of(numbers))}
        return [found.get(number) for number in numbers]

    def written(self, numbers: Sequence[int]) -> Iterator[tuple[int, list[Row]]]:
        """Yield these groups as their rows are written."""
        for part in self.parts(numbers):
            wanted = [row for number in part for row in self._rows_of(number)]
            rows = iter(self._source.read(wanted))
            for number in part:
                yield number, list(islice(rows, self.size(number)))

    def parts(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        """Divide groups into those whose rows are read together: what holds a row is read whole."""
        part: list[int] = []
        count = nbytes = 0
        for number in numbers:
            rows = self._rows_of(number)
            size = sum(map(self._source.most_bytes, rows))
            if part and (count + len(rows) > ROWS_AT_ONCE or nbytes + size > BYTES_AT_ONCE):
                yield part
                part, count, nbytes = [], 0, 0
            part.append(number)
            count, nbytes = count + len(rows), nbytes + size
        if part:
            yield part

    def _kept_of(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self.size(number) >= self._least]

    def _rows_of(self, number: int) -> range:
        first, end = self._judged.starts[number : number + 2].tolist()
        return range(first, end)
