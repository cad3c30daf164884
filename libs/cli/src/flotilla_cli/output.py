"""Prints results on stdout and messages on stderr, with tables and colours on a terminal.

Invariant: every text that a command prints goes through here, where what a terminal would obey is made visible, also
when the output is no terminal, because it may be shown on one later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp

from flotilla.common.v1.finding_pb2 import Finding, Severity
from flotilla.common.v1.version_pb2 import PolicyVersion
from flotilla.coordinator.v1.run_pb2 import Run, RunState
from flotilla_core.errors import FlotillaError
from flotilla_core.terminal import visible, visible_json

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """Print one object."""
    sys.stdout.write(visible_json(value, indent=2) + "\n")


def print_json_line(value: Any) -> None:
    """Print one object on a line of its own, for results without an end."""
    sys.stdout.write(visible_json(value) + "\n")


def print_line(text: str) -> None:
    """Print a line of the result."""
    sys.stdout.write(visible(text) + "\n")


def say(text: str) -> None:
    """Print a message: progress, hints, what happens."""
    sys.stderr.write(visible(text) + "\n")
    sys.stderr.flush()


def asked_line() -> str:
    """Return the line that somebody types after a prompt sign; empty at the end of the input."""
    sys.stderr.write("> ")
    sys.stderr.flush()
    return sys.stdin.readline()


def print_error(error: FlotillaError, *, as_json: bool) -> None:
    """Print an error with its place, its cause and the next step."""
    parts = {"where": error.where, "why": error.why, "next": error.next_step}
    red, plain = ("\033[1;31m", "\033[0m") if wants_colour(sys.stderr) else ("", "")
    sys.stderr.write(f"{red}error:{plain} {visible(error.what)}\n")
    for name, text in parts.items():
        if text:
            say(f"  {name + ':':6} {text.strip().replace(chr(10), chr(10) + ' ' * 9)}")
    if as_json:
        print_json({"error": {"reason": error.finding().code, "what": error.what, **parts}})


def finding_json(finding: Finding) -> dict[str, str]:
    """Describe a finding by all its parts."""
    known = finding.severity if finding.severity in Severity.values() else Severity.SEVERITY_UNSPECIFIED
    severity = Severity.Name(known).removeprefix("SEVERITY_").lower()
    parts = ("code", "what", "where", "why", "next_step")
    return {"severity": severity, **{part: getattr(finding, part) for part in parts}}


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns, wrapped to the width of a terminal, and as whole lines into a pipe."""
    if not sys.stdout.isatty():
        lines = [columns, *([visible(cell) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print_line("  ".join(cells).rstrip())
        return
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console_on(sys.stdout).print(table)


def console_on(stream: Any) -> Console:
    """Return a console of rich that shows texts as they are: no markup, no emoji, and nothing that a terminal obeys."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(visible(text), **options)

    return PlainConsole(
        file=stream, markup=False, emoji=False, highlight=False, no_color=not wants_colour(stream)
    )


def wants_colour(stream: Any) -> bool:
    """Return whether the stream is a terminal and NO_COLOR is not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def age(moment: Timestamp) -> str:
    """Return the time since `moment` in the largest fitting unit: 12s, 4m, 3h, 2d."""
    seconds = max(0.0, (datetime.now(UTC) - moment.ToDatetime(UTC)).total_seconds())
    return duration(seconds)


def local_time(moment: Timestamp) -> str:
    """Return the time on this machine's clock, to the second."""
    return moment.ToDatetime(UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """Return a duration in the largest fitting unit: 12s, 4m, 3h, 2d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def version_text(version: PolicyVersion) -> str:
    """Return the version as `lineage.step`."""
    return f"{version.lineage}.{version.step}"


def state_name(run: Run) -> str:
    """Return the state's name, such as `running` for RUN_STATE_RUNNING."""
    return RunState.Name(run.state).removeprefix("RUN_STATE_").lower()


def short_reward(name: str) -> str:
    """Return the name of a reward, or of a part of it, without the folders of its file."""
    file, bracket, part = name.partition("[")
    return os.path.basename(file) + bracket + part
