"""Reading the log files that the supervisor keeps, one a process.

A file holds every start of its process, each under a header line, so that a restart never hides why it
happened. Lines are JSON (structlog) or plain text from below (vLLM, a traceback, a crash in C).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

HEADER = "===="
"""Begins the line that the supervisor writes at each start."""
_POLL_S = 0.2
_BLOCK = 64 * 1024
_ERROR_LINE = re.compile(
    r"^\s*(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b\s*:|\b(ERROR|CRITICAL|FATAL|error):"
)


def tail(path: Path, lines: int, *, start: int = 0) -> list[str]:
    """Return the last lines of a file from byte `start` on; an absent file has none."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, 2)
            blocks: list[bytes] = []
            newlines = 0
            while position > start and newlines <= lines:
                step = min(_BLOCK, position - start)
                position -= step
                file.seek(position)
                blocks.append(file.read(step))
                newlines += blocks[-1].count(b"\n")
    except OSError:
        return []
    text = b"".join(reversed(blocks)).decode("utf-8", errors="replace")
    return text.splitlines()[-lines:] if lines else []


def failure_excerpt(path: Path, *, start: int = 0, lines: int = 20) -> tuple[str, list[str]]:
    """Return the line that says why a process died (empty where none does), and its last lines."""
    last = [line for line in tail(path, lines, start=start) if not line.startswith(HEADER)]
    for line in reversed(last):
        if (message := _error_in(line)) is not None:
            return message, last
    return "", last


async def read_logs(
    paths: Mapping[str, Path], lines: int, *, follow: bool, others: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[tuple[str, str]]:
    """Give (name, line) of all files merged by time, then new lines as they come while `follow` is set.

    `others` are the last lines of logs that have no file here; they are merged with those of the files.
    """
    offsets = {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}
    last = {name: tail(path, lines) for name, path in paths.items()} | dict(others or {})
    past = [
        (moment, order, name, line)
        for name, found in last.items()
        for order, (moment, line) in enumerate(_with_time(found))
    ]
    for _, _, name, line in sorted(past, key=lambda entry: entry[:2])[-lines:] if lines else []:
        yield name, line
    while follow:
        fresh = False
        for name, path in paths.items():
            offsets[name], new = _read_on(path, offsets[name])
            for line in new:
                fresh = True
                yield name, line
        if not fresh:
            await asyncio.sleep(_POLL_S)


def _read_on(path: Path, offset: int) -> tuple[int, list[str]]:
    """Whole lines after `offset`; a line that is still being written waits for its end."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return offset, []
    end = data.rfind(b"\n") + 1
    return offset + end, data[:end].decode("utf-8", errors="replace").splitlines()


def _with_time(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Each line with its ISO time; a line without one belongs to the moment of the line before it."""
    moment = ""
    timed = []
    for line in lines:
        if line.startswith("{") and (values := _json(line)):
            moment = str(values.get("time", moment))
        elif header := re.match(rf"{HEADER} (\S+)", line):
            moment = header[1]
        timed.append((moment, line))
    return timed


def _error_in(line: str) -> str | None:
    if line.startswith("{") and (values := _json(line)):
        if values.get("level") not in ("error", "critical"):
            return None
        parts = (str(values[key]) for key in ("event", "error") if values.get(key))
        return ": ".join(parts)
    return line.strip() if _ERROR_LINE.search(line) else None


def _json(line: str) -> dict[str, object]:
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
