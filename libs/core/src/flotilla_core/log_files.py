"""Log files of processes: their last lines, their new lines, and their bound.

Invariants: whatever a process writes, reading its log takes memory up to a limit that is known beforehand. A log that
has outgrown MOST_BYTES is cut in place while its process writes on: the process notices nothing, waits for nobody, and
its newest text stays beside the log as `NAME.log.1`. A writer opens its log for appending.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

HEADER = "===="
"""Begins a line that the keeper of a log writes into it: at each start of the process, and where it was cut."""
MOST_BYTES = 32 << 20
"""The size from which a log is cut."""
KEPT_BYTES = 28 << 20
"""The newest text of a log that is kept beside it; with the rest of MOST_BYTES as room for what comes meanwhile."""
MOST_READ_BYTES = 16 << 20
"""The most that the last lines of one log take."""
LONGEST_LINE_BYTES = 64 << 10
"""A longer line is cut, and says so."""
_BLOCK = 256 << 10
_AT_ONCE = 1 << 20
_MOST_LINES = 100_000


def tail(
    path: Path, lines: int, *, start: int = 0, end: int | None = None, most_bytes: int = MOST_READ_BYTES
) -> list[str]:
    """Return the last lines of a log between two positions, also those before its last cut; an absent log has none.

    A log that is shorter than `start` was cut since: then all that is left of it counts.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            cut_since = start > size
            first = 0 if cut_since else start
            found, read = _last(file, first, size if end is None else min(end, size), lines, most_bytes)
    except OSError:
        return []
    missing = lines - len(found)
    if first == 0 and missing > 0 and most_bytes > read:
        with contextlib.suppress(OSError), former(path).open("rb") as file:
            before, _ = _last(file, 0, file.seek(0, os.SEEK_END), missing, most_bytes - read)
            found = before + found
    return found


class Follower:
    """Reads a log on while it is written."""

    def __init__(self, path: Path) -> None:
        """Begin where the log ends now, or with its last line where that is still being written."""
        self._path = path
        self._position = 0
        with contextlib.suppress(OSError), path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, end - LONGEST_LINE_BYTES))
            unfinished = file.read(end - begin).rpartition(b"\n")[2]
            self._position = end - len(unfinished) if len(unfinished) < LONGEST_LINE_BYTES else end

    def last(self, lines: int) -> list[str]:
        """Return the last lines before those that `more` returns."""
        return tail(self._path, lines, end=self._position)

    def more(self) -> list[str]:
        """Return lines that were completed since, a limited number of them; none where there are none yet."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0  # It was cut.
                file.seek(self._position)
                data = file.read(_BLOCK)
        except OSError:
            return []
        # Without any newline the line is too long to be waited for: it comes in pieces.
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _BLOCK else 0)
        self._position += end
        return _texts(data[:end])


def keep_bounded(logs: Iterable[Path]) -> None:
    """Cut each log that has outgrown MOST_BYTES; one that cannot be cut now is cut the next time."""
    for log in logs:
        with contextlib.suppress(OSError):
            status = log.stat()
            if stat.S_ISREG(status.st_mode) and status.st_size > MOST_BYTES:
                _cut(log, status.st_size)


def former(log: Path) -> Path:
    """Return the file with the text of a log from before its last cut."""
    return log.with_name(f"{log.name}.1")


def copy_last(log: Path, target: Path, *, since: datetime | None, most_bytes: int) -> None:
    """Write the last lines of a log to a new file, from a moment on where the log says times."""
    lines = tail(log, _MOST_LINES, most_bytes=most_bytes)
    if since is not None:
        begin = since.astimezone(UTC).isoformat()
        timed = with_time(lines)
        lines = [line for moment, line in timed if not moment or moment >= begin]
    with target.open("x", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def with_time(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return each line with its ISO time; one without a time belongs to the moment of the line before it."""
    moment = ""
    timed = []
    for line in lines:
        if line.startswith("{") and (values := line_values(line)):
            moment = str(values.get("time", moment))
        elif header := re.match(rf"{HEADER} (\S+)", line):
            moment = header[1]
        timed.append((moment, line))
    return timed


def line_values(line: str) -> dict[str, object]:
    """Return what a line of JSON holds; nothing for any other line."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _cut(log: Path, size: int) -> None:
    with log.open("r+b") as file:
        with former(log).open("wb") as kept:
            os.fchmod(kept.fileno(), 0o600)
            file.seek(size - KEPT_BYTES)
            file.readline(LONGEST_LINE_BYTES)
            # To the end: a line that comes meanwhile is lost only in the instant between the last read and the cut.
            # What a process writes faster than this copies is lost.
            while kept.tell() < MOST_BYTES and (block := file.read(_AT_ONCE)):
                kept.write(block)
        file.truncate(0)
    with log.open("ab") as file:
        now = datetime.now(UTC).isoformat()
        file.write(f"{HEADER} {now} cut: earlier lines are in {former(log).name}\n".encode())


def _last(file: IO[bytes], start: int, end: int, lines: int, most_bytes: int) -> tuple[list[str], int]:
    """Return the last lines between two positions, and how many bytes were read for them."""
    if lines <= 0:
        return [], 0
    position, newlines = end, 0
    blocks: list[bytes] = []
    nearest = max(start, end - most_bytes)
    while position > nearest and newlines <= lines:
        step = min(_BLOCK, position - nearest)
        position -= step
        file.seek(position)
        blocks.append(file.read(step))
        newlines += blocks[-1].count(b"\n")
    data = b"".join(reversed(blocks))
    texts = _texts(data)
    if position > start and texts and len(texts) <= lines:
        # Its begin is out of reach.
        texts[0] = f"... {_split(data)[0][-LONGEST_LINE_BYTES:].decode(errors='replace')}"
    return texts[-lines:], len(data)


def _texts(data: bytes) -> list[str]:
    lines = _split(data)
    return [line_text(line) for line in (lines if lines[-1] else lines[:-1])]


def _split(data: bytes) -> list[bytes]:
    """Return the lines of a text; a progress bar ends each of its own with a carriage return."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")


def line_text(line: bytes) -> str:
    """Return a line as text, cut where it is too long."""
    more = len(line) - LONGEST_LINE_BYTES
    text = line[:LONGEST_LINE_BYTES].decode("utf-8", errors="replace")
    return f"{text} ... ({more} bytes more)" if more > 0 else text
