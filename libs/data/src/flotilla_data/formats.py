"""Says what data files are written as, and how large their parts may be.

Invariants: the end of a name says what is in a file; an unknown one is taken for lines. Limits hold for what a file
holds when it is unpacked, so that a small file cannot take much memory or disk.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from flotilla_core.errors import InvalidConfig
from flotilla_core.files import open_regular

LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".zst")
COLUMNS = (".parquet", ".arrow")

LONGEST_LINE = 64 << 20
"""The limit in bytes, of a row too; a prompt of a million tokens has a tenth of that."""
MOST_ROWS = 20_000_000
"""The most rows of one data set: the place and the order of a row take about 40 bytes of memory."""
MOST_COLUMNS = 4096

PIECE_ROWS = 128
"""The rows of a copy that are read together; a step draws single rows from all over the file."""
PIECE_BYTES = 16 << 20
PIECE_VALUES = 1 << 20
"""The most values of a piece of several rows; where one would have more, each piece of the copy has one row."""
ROWS_OF_PIECES = b"flotilla.piece_rows"
"""The key of a copy's schema that says how many rows its pieces have."""

NEXT = "set data.train or evaluation.data"


def unreadable(path: Path, error: Exception) -> InvalidConfig:
    """Make the error for a data file that the system or its reader refuses."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return InvalidConfig("the data file cannot be read", where=str(path), why=why, next_step=NEXT)


def too_many_rows(where: Path | str) -> InvalidConfig:
    """Make the error for a data set with too many rows."""
    return InvalidConfig(
        "the data set has too many rows",
        where=str(where),
        why=f"it has more than {MOST_ROWS:,}, the limit",
        next_step="name a part of it",
    )


def no_rows(where: Path | str) -> InvalidConfig:
    """Make the error for a data set without rows."""
    return InvalidConfig(
        "the data set has no rows",
        where=str(where),
        next_step="write one JSON object a line, or name a file that has rows",
    )


def is_data(path: Path) -> bool:
    """Return whether the name is that of a file that can be read here."""
    suffix, packed = suffixes(path)
    return suffix in LINES or (suffix in COLUMNS and not packed)


def suffixes(path: Path) -> tuple[str, str]:
    """Return the suffix of the content and that of its compression."""
    packed = path.suffix if path.suffix in PACKED else ""
    return Path(path.name.removesuffix(packed)).suffix, packed


def has_columns(path: Path) -> bool:
    """Return whether the file holds Arrow columns rather than JSON."""
    return suffixes(path)[0] in COLUMNS


def has_plain_lines(path: Path) -> bool:
    """Return whether the file's bytes are its lines, so that each can be read where it stands."""
    suffix, packed = suffixes(path)
    if packed:
        return False
    if suffix != ".json":
        return True
    with open_regular(path) as file:
        return file.read(256).removeprefix(BOM_UTF8).lstrip()[:1] != b"["


def pyarrow_for(path: Path) -> Any:
    """Import pyarrow, or say what to do where it is missing."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError:
        raise InvalidConfig(
            "Parquet and Arrow files need the package pyarrow",
            where=str(path),
            next_step="install the coordinator with its extra `report`, or write the data as JSON lines",
        ) from None
    return pa
