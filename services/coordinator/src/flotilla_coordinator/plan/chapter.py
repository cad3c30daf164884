"""Holds what a plan is made of, and picks the remarks that a user sees when the run starts.

A part of a plan is a generator: it yields a line, a warning or a refusal where it works out the reason for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

from flotilla.common.v1.finding_pb2 import SEVERITY_ERROR, SEVERITY_WARNING, Finding
from flotilla.coordinator.v1 import run_pb2
from flotilla_core.findings import info, text_of

STARTING_WEIGHTS = "starting weights"


class Line(NamedTuple):
    """A figure or a choice of the run, explained."""

    name: str
    value: str
    explanation: str


def refusal(what: str) -> Finding:
    """Return an error: the run would not start, by which key, and what to do."""
    return Finding(severity=SEVERITY_ERROR, what=what)


Entry = Line | Finding
"""A finding is a warning, where something may fail or surprise, or a refusal."""
Entries = Iterator[Entry]


class Chapter(NamedTuple):
    """The entries of some parts of a plan, sorted by kind."""

    lines: list[Line]
    findings: list[Finding]

    @classmethod
    def of(cls, *parts: Iterable[Entry]) -> Self:
        """Return the entries of these parts in their order, each kind by itself."""
        entries = [entry for part in parts for entry in part]
        return cls(
            [one for one in entries if isinstance(one, Line)],
            [one for one in entries if isinstance(one, Finding)],
        )

    @property
    def warnings(self) -> list[str]:
        """Return the texts of its warnings."""
        return [text_of(one) for one in self.findings if one.severity == SEVERITY_WARNING]

    @property
    def errors(self) -> list[str]:
        """Return the texts of its refusals."""
        return [text_of(one) for one in self.findings if one.severity == SEVERITY_ERROR]

    def write(self, plan: run_pb2.Plan) -> None:
        """Append this chapter to a plan."""
        plan.lines.extend(run_pb2.PlanLine(**line._asdict()) for line in self.lines)
        plan.findings.extend(self.findings)
        plan.warnings.extend(self.warnings)
        plan.errors.extend(self.errors)


def shown_bytes(number: float) -> str:
    """Write a number of bytes in the largest unit that leaves at least one, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def remarks(plan: run_pb2.Plan, *, forked: bool = False) -> Iterator[Finding]:
    """Return the weights that the run starts from, and every warning; a fork has its weights from a checkpoint."""
    for line in plan.lines:
        if line.name == STARTING_WEIGHTS and not forked:
            yield info(f"{line.name}: {line.value} ({line.explanation})")
    yield from (one for one in plan.findings if one.severity == SEVERITY_WARNING)
