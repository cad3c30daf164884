"""One table for every bench: what was measured, the figure, the bar where there is one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure."""

    what: str
    figure: str
    bar: str = ""
    met: bool | None = None


def render(rows: list[Row]) -> str:
    """Plain text, aligned."""
    header = Row("what", "figure", "bar")
    width = max(len(row.what) for row in [header, *rows])
    figures = max(len(row.figure) for row in [header, *rows])
    verdict = {True: "met", False: "MISSED", None: ""}
    lines = [f"{header.what:<{width}}  {header.figure:>{figures}}  bar"]
    lines += [f"{r.what:<{width}}  {r.figure:>{figures}}  {r.bar} {verdict[r.met]}".rstrip() for r in rows]
    return "\n".join(lines)
