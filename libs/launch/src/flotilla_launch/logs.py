"""Reading the logs of a stack: why a process died, and all logs merged by time.

A log holds every start of its process, each under a header line, so that a restart never hides why it
happened. Lines are JSON (structlog) or plain text from below (vLLM, a traceback, a crash in C).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from flotilla_core.log_files import HEADER, Follower, line_values, tail, with_time

_POLL_S = 0.2
_EXCERPT_BYTES = 64 << 10
_LONGEST_QUOTED = 1000
"""Characters of one line of a log in an error."""
_NOT_QUOTED = ("time", "service", "level", "event", "logger", "exception")
_ERROR_LINE = re.compile(
    r"^\s*(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b\s*:|\b(ERROR|CRITICAL|FATAL|error):"
)


def failure_excerpt(path: Path, *, start: int = 0, lines: int = 20) -> tuple[str, list[str]]:
    """Return the line that says why a process died (empty where none does), and its last lines."""
    found = tail(path, lines, start=start, most_bytes=_EXCERPT_BYTES)
    last = [line for line in found if not line.startswith(HEADER)]
    why = next((message for line in reversed(last) if (message := _error_in(line)) is not None), "")
    return _quoted(why), [_quoted(_readable(line)) for line in last]


async def read_logs(
    paths: Mapping[str, Path], lines: int, *, follow: bool, others: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[tuple[str, str]]:
    """Give (name, line) of all files merged by time, then new lines as they come while `follow` is set.

    `others` are the last lines of logs that have no file here; they are merged with those of the files.
    """
    followers = {name: Follower(path) for name, path in paths.items()} if follow else {}
    last = {
        name: followers[name].last(lines) if follow else tail(path, lines) for name, path in paths.items()
    }
    past = [
        (moment, order, name, line)
        for name, found in (last | dict(others or {})).items()
        for order, (moment, line) in enumerate(with_time(found))
    ]
    for _, _, name, line in sorted(past, key=lambda entry: entry[:2])[-lines:] if lines else []:
        yield name, line
    while follow:
        fresh = False
        for name, follower in followers.items():
            for line in follower.more():
                fresh = True
                yield name, line
        if not fresh:
            await asyncio.sleep(_POLL_S)


def _quoted(line: str) -> str:
    more = len(line) - _LONGEST_QUOTED
    return f"{line[:_LONGEST_QUOTED]} ... ({more} characters more)" if more > 0 else line


def _readable(line: str) -> str:
    """Return a line as a person reads it: level, event and what else it says, without its time and its service."""
    values = line_values(line) if line.startswith("{") else {}
    if "event" not in values:
        return line
    said = " ".join(f"{key}={value}" for key, value in values.items() if key not in _NOT_QUOTED)
    return "  ".join(filter(None, (f"{values.get('level', 'info')}: {values['event']}", said)))


def _error_in(line: str) -> str | None:
    if line.startswith("{") and (values := line_values(line)):
        if values.get("level") not in ("error", "critical"):
            return None
        parts = (str(values[key]) for key in ("event", "error") if values.get(key))
        return ": ".join(parts)
    return line.strip() if _ERROR_LINE.search(line) else None
