"""JSON from other authors, read within limits.

Invariants: a file or a line that is larger than its limit is not read to its end; whatever is wrong is an InvalidConfig
that names the place and the limit, however the text was made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from flotilla_core.errors import InvalidConfig
from flotilla_core.files import open_regular

MOST_VALUES = 4 << 20
"""Limit for the values of one text; an empty list takes 72 bytes of memory, and three of text."""
MOST_BYTES = 64 << 20
"""Limit for one file; the index of the weights of a very large model has a tenth of that."""
MOST_LINE_BYTES = 16 << 20
"""Limit for one line of a file that grows by lines."""


def json_lines(file: IO[bytes], position: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the object of each whole line, with the position behind the line, where `file` stands at `position`.

    A line that is damaged, half written or longer than MOST_LINE_BYTES is skipped.
    """
    skipping = False
    while line := file.readline(MOST_LINE_BYTES):
        position += len(line)
        whole = line.endswith(b"\n")
        if skipping or not whole:
            skipping = not whole
            continue
        try:
            values = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield position, values


def json_object(
    raw: bytes, where: str, *, what: str = "the text", finite: bool = False, next_step: str = ""
) -> dict[str, Any]:
    """Return the object in a text; `finite` refuses NaN and infinity, which JSON cannot express.

    `next_step` is that of the error where the text is no JSON object.
    """
    decoder = _FINITE if finite else _ANY
    if len(raw) > MOST_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise InvalidConfig(
            f"{what} has too many values", where=where, why=f"it has more than {MOST_VALUES:,}, the limit"
        )
    try:
        values = decoder.decode(raw.decode("utf-8"))
        if b"\\u" in raw:
            # Escapes can spell half of a surrogate pair, which no text may hold.
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidConfig(
            f"{what} is not Unicode", where=where, why="it holds half of a surrogate pair"
        ) from None
    except RecursionError:
        raise InvalidConfig(
            f"{what} is nested too deeply",
            where=where,
            why="its levels are more than Python can follow, about 1000",
        ) from None
    except ValueError as error:
        raise InvalidConfig(f"{what} is not JSON", where=where, why=str(error), next_step=next_step) from None
    if not isinstance(values, dict):
        raise InvalidConfig(
            f"{what} is not a JSON object",
            where=where,
            why=f"it is a {type(values).__name__}",
            next_step=next_step,
        )
    return values


def finite_json(text: str) -> Any:
    """Return the value of a text; raise ValueError where it is no JSON, or has a number that JSON cannot express."""
    return _FINITE.decode(text)


def read_json_object(path: Path, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a file; a missing file stays a FileNotFoundError, which the reader can explain better."""
    content = read_bounded(path, "the file", str(path), most_bytes)
    return json_object(content, str(path), what=path.name)


def read_bounded(path: Path, what: str, where: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what a file holds, but no more than its limit; a missing file stays a FileNotFoundError."""
    try:
        with open_regular(path) as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidConfig(f"{what} cannot be read", where=where, why=error.strerror or str(error)) from None
    if len(content) > most_bytes:
        raise InvalidConfig(
            f"{what} is too large",
            where=where,
            why=f"it has more than {most_bytes} bytes, the limit of its kind",
        )
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


_ANY = json.JSONDecoder()
_FINITE = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)
