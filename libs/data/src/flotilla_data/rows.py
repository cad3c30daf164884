"""Gives access to any row of a data set by its number, without holding the rows in memory.

Invariants: a row's number is its place among all rows of the data set, one file after the other, and bad rows have a
number too. Files of JSON lines are read where they stand; of any other file a copy is made once, under the digest of
its content, from which a row can be read. A file that somebody writes while it is read is refused by name.
"""

from __future__ import annotations

import os
import tempfile
import threading
from array import array
from bisect import bisect
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from flotilla_core.bounded_process import BoundedProcess
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_core.files import open_regular
from flotilla_core.generated_tasks import PACKAGE, TaskSource, is_generated, package_version
from flotilla_core.json_text import json_object
from flotilla_data.columns import is_sent_as_text
from flotilla_data.copies import copy_of, decoder_of, rows_of_tasks
from flotilla_data.files import Identity, content_digest, data_files, identity
from flotilla_data.formats import (
    LONGEST_LINE,
    MOST_ROWS,
    PIECE_BYTES,
    PIECE_ROWS,
    ROWS_OF_PIECES,
    has_columns,
    has_plain_lines,
    pyarrow_for,
    too_many_rows,
    unreadable,
)

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 4096
BYTES_AT_ONCE = 16 << 20
"""Rows that are larger together are not in memory together, unless somebody keeps what is made of them."""

_FORMATS = (
    "write one JSON object a line, or name a file of Parquet or Arrow, which ends in .parquet or .arrow"
)

Proof = Callable[["pa.RecordBatch"], bool]
"""Says whether a look at whole columns shows that all of their rows can be used."""


class Row(NamedTuple):
    """One row of a data set."""

    number: int
    where: str
    """File and line, or file and row, for messages."""
    values: dict[str, Any]
    error: InvalidConfig | None = None
    """The reason why the row has no values."""


class LineRows:
    """Rows of JSON lines, which are read from the file each time."""

    def __init__(self, path: Path, shown: Path, unit: str) -> None:
        self._shown, self._unit = shown, unit
        self._file = open_regular(path)
        self._now = self._identity()
        starts, sizes, lines = array("q"), array("i"), array("i")
        place = 0
        for line, size in enumerate(_line_sizes(self._file), 1):
            if size > 0:
                starts.append(place)
                sizes.append(min(size, LONGEST_LINE + 1))
                lines.append(line)
            if len(starts) > MOST_ROWS:
                raise too_many_rows(shown)
            place += abs(size)
        self.nbytes = place
        self._starts = np.frombuffer(starts, np.int64) if starts else np.zeros(0, np.int64)
        self._sizes = np.frombuffer(sizes, np.int32) if sizes else np.zeros(0, np.int32)
        # Only blank lines make a row's number another one than its line's.
        self._lines = np.frombuffer(lines, np.int32) if lines and lines[-1] != len(lines) else None

    def __len__(self) -> int:
        return len(self._starts)

    def most_bytes(self, number: int) -> int:
        """Return how large a row is."""
        return int(self._sizes[number])

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Return these rows, in this order."""
        if self._identity() != self._now:
            raise FailedPrecondition(
                "the data file changed while a run reads it",
                where=str(self._shown),
                next_step="restore it, or start a new run",
            )
        return [self._row(number) for number in numbers]

    def unproven(self, proof: Proof | None) -> Iterator[Row]:
        """Return all rows: lines have no columns to look at."""
        for part in parts(self, range(len(self))):
            yield from self.read(part)

    def _row(self, number: int) -> Row:
        line = number + 1 if self._lines is None else int(self._lines[number])
        where = f"{self._shown}, {self._unit} {line}"
        size = int(self._sizes[number])
        try:
            if size > LONGEST_LINE:
                raise InvalidConfig(
                    "the line is too long",
                    where=where,
                    why=f"it has more than {LONGEST_LINE} bytes, the limit",
                )
            raw = os.pread(self._file.fileno(), size, int(self._starts[number]))
            # Editors of Windows write the mark of UTF-8 before the first row.
            raw = raw if number else raw.removeprefix(BOM_UTF8)
            what = f"the {self._unit}"
            return Row(number, where, json_object(raw, where, what=what, finite=True, next_step=_FORMATS))
        except InvalidConfig as error:
            return Row(number, where, {}, error)

    def _identity(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


def _line_sizes(file: BinaryIO) -> Iterator[int]:
    """Return the bytes of each line, as a negative number where it is blank."""
    while raw := file.readline(LONGEST_LINE + 1):
        size = len(raw)
        blank = raw.isspace()
        while len(raw) > LONGEST_LINE and not raw.endswith(b"\n"):
            raw = file.readline(LONGEST_LINE + 1)
            size += len(raw)
        yield -size if blank else size


class ArrowRows:
    """Rows of Arrow columns, of which a piece is read at a time; all pieces but the last have as many rows."""

    def __init__(self, path: Path, shown: Path) -> None:
        pa = pyarrow_for(shown)
        self._shown = shown
        self._reader = pa.ipc.open_file(pa.OSFile(str(path), "rb"))
        self._one_at_a_time = threading.Lock()
        self._pieces = int(self._reader.num_record_batches)
        schema = self._reader.schema
        self._piece_rows = int((schema.metadata or {}).get(ROWS_OF_PIECES, PIECE_ROWS))
        last = self._pieces - 1
        self._length = last * self._piece_rows + int(self._piece(last).num_rows) if self._pieces else 0
        self.nbytes = path.stat().st_size
        self._as_text = [column.name for column in schema if is_sent_as_text(column.type)]

    def __len__(self) -> int:
        return self._length

    def most_bytes(self, number: int) -> int:
        """Return how large a row may be: nobody has measured each."""
        return LONGEST_LINE if self._piece_rows == 1 else PIECE_BYTES // PIECE_ROWS

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Return these rows, in this order."""
        by_piece: dict[int, list[int]] = {}
        for number in numbers:
            by_piece.setdefault(number // self._piece_rows, []).append(number)
        found: dict[int, Row] = {}
        for at, own in by_piece.items():
            piece, first = self._piece(at), at * self._piece_rows
            if len(own) * 4 > piece.num_rows:
                found |= {row.number: row for row in self._rows(piece, first)}
                continue
            for number in own:
                found |= {row.number: row for row in self._rows(piece.slice(number - first, 1), number)}
        return [found[number] for number in numbers]

    def unproven(self, proof: Proof | None) -> Iterator[Row]:
        """Return the rows in their order, without pieces that `proof` makes sure of."""
        for at in range(self._pieces):
            piece = self._piece(at)
            if proof is None or not proof(piece):
                yield from self._rows(piece, at * self._piece_rows)

    def _piece(self, at: int) -> pa.RecordBatch:
        with self._one_at_a_time:
            return self._reader.get_batch(at)

    def _rows(self, piece: pa.RecordBatch, first: int) -> Iterator[Row]:
        try:
            rows = piece.to_pylist()
        except (ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            if (
                piece.num_rows > 1
            ):  # Only one of them has a value that Python has not, such as a time after 9999.
                for at in range(piece.num_rows):
                    yield from self._rows(piece.slice(at, 1), first + at)
            else:
                where = f"{self._shown}, row {first + 1}"
                problem = InvalidConfig(
                    "the row has a value that cannot be read", where=where, why=str(error)
                )
                yield Row(first, where, {}, problem)
            return
        for number, values in enumerate(rows, first):
            for name in self._as_text:
                if values[name] is not None:
                    values[name] = str(values[name])
            yield Row(number, f"{self._shown}, row {number + 1}", values)


FileRows = LineRows | ArrowRows
"""The rows of one file; numbers begin at 0 in each."""


class Rows:
    """The rows of a data set of any number of files."""

    def __init__(self, source: Path, files: Sequence[Identity], rows: Sequence[FileRows]) -> None:
        self.source = source
        self._rows = rows
        self._ends = list(accumulate(len(one) for one in rows))
        name = f"{source} of {PACKAGE} {package_version()}" if is_generated(source) else ""
        self.digests = {name or str(file.path): content_digest(file) for file in files}
        """The digest of each file's content."""
        self.judged: dict[Any, tuple[frozenset[int], tuple[str, ...], npt.NDArray[np.int64] | None]] = {}
        """Results by the rules of the judgement: bad rows, the names of the first ones, and the order by difficulty."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def digest(self) -> str:
        """The digest of the content of all files, in their order."""
        return blake2b(" ".join(self.digests.values()).encode(), digest_size=16).hexdigest()

    @property
    def nbytes(self) -> int:
        """The size of all rows as they are stored."""
        return sum(one.nbytes for one in self._rows)

    def most_bytes(self, number: int) -> int:
        """Return how large a row may be."""
        at = bisect(self._ends, number)
        return self._rows[at].most_bytes(number - self._first(at))

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Return these rows, in this order."""
        if len(self._rows) == 1:
            return self._rows[0].read(numbers)
        by_file: dict[int, list[int]] = {}
        for number in numbers:
            by_file.setdefault(bisect(self._ends, number), []).append(number)
        found: dict[int, Row] = {}
        for at, own in by_file.items():
            first = self._first(at)
            for row in self._rows[at].read([number - first for number in own]):
                found[row.number + first] = _numbered(row, first)
        return [found[number] for number in numbers]

    def unproven(self, proof: Proof | None = None) -> Iterator[Row]:
        """Return the rows in their order, without those that `proof` makes sure of."""
        for at, one in enumerate(self._rows):
            first = self._first(at)
            yield from (
                one.unproven(proof) if first == 0 else (_numbered(row, first) for row in one.unproven(proof))
            )

    def _first(self, at: int) -> int:
        return self._ends[at - 1] if at else 0


def parts(rows: Rows | FileRows, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide rows into those that are read together: neither many nor large."""
    start = nbytes = 0
    for at, number in enumerate(numbers):
        size = rows.most_bytes(number)
        if at - start == ROWS_AT_ONCE or (at > start and nbytes + size > BYTES_AT_ONCE):
            yield numbers[start:at]
            start, nbytes = at, 0
        nbytes += size
    if start < len(numbers):
        yield numbers[start:]


def _numbered(row: Row, first: int) -> Row:
    return Row(row.number + first, row.where, row.values, row.error)


def open_rows(source: Path, split: str, copies: Path | None) -> Rows:
    """Return the rows of a data set; `copies` gets those of tasks and of files that cannot be read where they stand."""
    folder = copies or Path(_folder_of_process().name)
    if is_generated(source):
        paths = [rows_of_tasks(TaskSource.parse(source), split, folder)]
    else:
        paths = data_files(source, split)
    return _opened(source, tuple(map(identity, paths)), folder)


@lru_cache(maxsize=8)
def _opened(source: Path, files: tuple[Identity, ...], copies: Path) -> Rows:
    """Open files once while they do not change: a plan and its run read the same ones."""
    with decoder_of(files) as decoder:
        rows = Rows(source, files, [_rows_of(file, copies, decoder) for file in files])
    if len(rows) > MOST_ROWS:
        raise too_many_rows(source)
    return rows


def _rows_of(file: Identity, copies: Path, decoder: BoundedProcess) -> FileRows:
    path = file.path
    try:
        if has_columns(path):
            return ArrowRows(copy_of(file, copies, decoder), path)
        if has_plain_lines(path):
            return LineRows(path, path, "line")
        return LineRows(copy_of(file, copies, decoder), path, "row" if ".json" in path.suffixes else "line")
    except OSError as error:
        raise unreadable(path, error) from None


@cache
def _folder_of_process() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that ends with the process."""
    return tempfile.TemporaryDirectory(prefix="flotilla-data-")
