"""Writes what a data file holds as a plain file: its JSON as lines, its columns as pieces of Arrow.

The formats of data files let a few bytes stand for gigabytes, and no library bounds what it decodes. So this runs in a
process within bounds (`flotilla_data.copies` asks it), and everybody else reads what it wrote.

Invariants: what is written is sound and small to read: columns are validated whole, and no piece of rows is large, nor
a row larger than a line may be. It imports nothing that only the other process needs.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import zstandard

from flotilla_core.errors import DiskFull, InvalidConfig
from flotilla_core.files import open_regular
from flotilla_core.json_text import MOST_VALUES
from flotilla_core.structs import MOST_LEVELS
from flotilla_data.formats import (
    LONGEST_LINE,
    MOST_COLUMNS,
    MOST_ROWS,
    PIECE_BYTES,
    PIECE_ROWS,
    PIECE_VALUES,
    ROWS_OF_PIECES,
    has_columns,
    pyarrow_for,
    suffixes,
    too_many_rows,
    unreadable,
)

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 4096
BATCH_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_BLANKS = re.compile(r"[ \t\n\r]*")


def write_plainly(question: dict[str, Any]) -> None:
    """Write the content of the file `path` to `target`."""
    path, target = Path(question["path"]), Path(question["target"])
    try:
        (_write_columns if has_columns(path) else _write_lines)(path, target)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise InvalidConfig(
                "the data file is too large when it is unpacked",
                where=str(path),
                why=f"it has more than {question['most_bytes'] >> 20:,} MiB then, the limit for its size",
                next_step="unpack it yourself, and name the unpacked file",
            ) from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise DiskFull(
                "the copy of a data file cannot be written",
                where=str(target.parent.parent),
                why=error.strerror or str(error),
                next_step="make room there",
            ) from None
        raise unreadable(path, error) from None


def _write_lines(path: Path, target: Path) -> None:
    """Write the unpacked lines, or the items of a JSON list as a line each."""
    try:
        with open_regular(path) as raw, target.open("wb") as copy:
            file = _unpacked(path, raw)
            first = file.read(_READ_BYTES).removeprefix(codecs.BOM_UTF8)
            if suffixes(path)[0] == ".json" and first.lstrip()[:1] == b"[":
                copy.writelines(
                    json.dumps(item, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
                    for item in _ListItems(first, file)
                )
            else:
                copy.write(first)
                shutil.copyfileobj(file, copy, _READ_BYTES)
    except (EOFError, ValueError, RecursionError, zlib.error, zstandard.ZstdError) as error:
        raise unreadable(path, error) from None


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(cast("Any", stream))
    return raw


class _ListItems:
    """The items of a JSON list, of which one is in memory at a time."""

    def __init__(self, first: bytes, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = self._decoder.decode(first)
        self._at = 0
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        self._require("[")
        if self._sign() == "]":
            self._at += 1
        else:
            yield self._item()
            while self._sign() == ",":
                self._at += 1
                yield self._item()
            self._require("]")
        if self._sign():
            raise ValueError("there is text after the list")

    def _require(self, sign: str) -> None:
        if (found := self._sign()) != sign:
            raise ValueError(f"{found or 'the end'!r} stands where {sign!r} is expected")
        self._at += 1

    def _sign(self) -> str:
        """Return the next character that is not blank; empty at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            self._at = blanks.end() if blanks else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._over:
                return ""
            self._read(_READ_BYTES)

    def _item(self) -> Any:
        self._sign()
        more = _READ_BYTES
        while True:
            try:
                item, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._over:  # else a number may go on
                    self._at = end
                    return item
            except (ValueError, RecursionError):
                if self._over:
                    raise
            if len(self._text) - self._at > LONGEST_LINE:
                raise ValueError(
                    f"an item of the list is wrong, or has more than {LONGEST_LINE} bytes, the limit"
                )
            self._read(more)
            more *= 2

    def _read(self, count: int) -> None:
        raw = self._file.read(count)
        self._over = not raw
        self._text = self._text[self._at :] + self._decoder.decode(raw, final=self._over)
        self._at = 0


_DECODER = json.JSONDecoder()


class _HeavyPiece(Exception):
    """The rows of a piece are too large to be read together."""


def _write_columns(path: Path, target: Path) -> None:
    # This comes first because it says what to do where pyarrow is missing.
    pa = pyarrow_for(path)
    try:
        try:
            _write_pieces(path, target, PIECE_ROWS)
        except _HeavyPiece:
            _write_pieces(path, target, 1)
    except MemoryError:
        raise
    except pa.ArrowException as error:
        raise unreadable(path, error) from None


def _write_pieces(path: Path, target: Path, rows: int) -> None:
    """Write pieces of so many rows; the last one may have fewer."""
    import pyarrow as pa

    schema, batches = _record_batches(path)
    # A file has one dictionary for a column, and batches may each bring their own.
    schema = pa.schema(
        [
            pa.field(one.name, one.type.value_type) if pa.types.is_dictionary(one.type) else one
            for one in schema
        ],
        {ROWS_OF_PIECES: str(rows)},
    )
    _require_usual(schema, path)
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        rest, written = pa.Table.from_batches([], schema), 0
        for batch in batches:
            batch.validate(full=True)
            if written + rest.num_rows + batch.num_rows > MOST_ROWS:
                raise too_many_rows(path)
            table = pa.concat_tables([rest, pa.Table.from_batches([batch]).cast(schema)])
            whole = table.num_rows - table.num_rows % rows
            written += _write(writer, table.slice(0, whole), rows, written, path)
            rest = table.slice(whole)
        if rest.num_rows:
            _write(writer, rest, rows, written, path)


def _write(writer: pa.RecordBatchWriter, table: pa.Table, rows: int, before: int, path: Path) -> int:
    """Write a table of whole pieces and return its number of rows, unless a piece is too large."""
    for piece in table.combine_chunks().to_batches(rows):
        values, size = sum(map(_values_in, piece.columns)), piece.nbytes
        if rows > 1 and (values > PIECE_VALUES or size > PIECE_BYTES):
            raise _HeavyPiece
        if values > MOST_VALUES or size > LONGEST_LINE:
            raise InvalidConfig(
                "the row is too large",
                where=f"{path}, row {before + 1}",
                why=f"it has {values:,} values in {size:,} bytes; the limits are {MOST_VALUES:,} and {LONGEST_LINE:,}",
                next_step="leave it out",
            )
        writer.write_batch(piece)
        before += rows
    return int(table.num_rows)


def _values_in(array: pa.Array) -> int:
    """Return how many Python objects its rows become, about."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_struct(kind):
        return len(array) + sum(map(_values_in, array.flatten()))
    if pa.types.is_map(kind):
        first, last = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        return len(array) + sum(_values_in(of.slice(first, last - first)) for of in (array.keys, array.items))
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return len(array) + _values_in(array.flatten())
    return len(array)


def _require_usual(schema: pa.Schema, path: Path) -> None:
    """Refuse columns that nobody could mean."""
    if len(schema) > MOST_COLUMNS:
        raise InvalidConfig(
            "the data file has too many columns",
            where=str(path),
            why=f"it has {len(schema):,}, and the limit is {MOST_COLUMNS:,}",
            next_step="leave out those that no reward needs",
        )
    if len(set(schema.names)) < len(schema):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise InvalidConfig(
            "several columns have one name",
            where=str(path),
            why=f"it is {twice[:100]!r}",
            next_step="give each column a name of its own",
        )
    for column in schema:
        levels, inside = 0, [column.type]
        while inside := [kind.field(at).type for kind in inside for at in range(kind.num_fields)]:
            levels += 1
            if levels > 2 * MOST_LEVELS or len(inside) > MOST_COLUMNS:
                raise InvalidConfig(
                    "a column is nested too deeply or too widely",
                    where=f"{path}, column {column.name[:100]!r}",
                    why=f"the limits are {2 * MOST_LEVELS} levels and {MOST_COLUMNS:,} columns in each",
                    next_step="write it as a text of JSON",
                )


def _record_batches(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the columns of a Parquet or an Arrow file, piece by piece."""
    pa = pyarrow_for(path)
    with open_regular(path):
        pass  # pyarrow waits for the writer of a named pipe.
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        parquet = pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)
        about = parquet.metadata
        if about.num_rows > MOST_ROWS:
            raise too_many_rows(path)
        size = sum(about.row_group(at).total_byte_size for at in range(about.num_row_groups))
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES * about.num_rows // max(1, size)))
        return parquet.schema_arrow, parquet.iter_batches(batch_size=rows, use_threads=False)
    source = pa.OSFile(str(path), "rb")
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # a stream, as the library `datasets` writes it
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        return stream.schema, iter(stream)
    return file.schema, (file.get_batch(at) for at in range(file.num_record_batches))
