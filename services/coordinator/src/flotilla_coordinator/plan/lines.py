"""Holds what the lines of a plan share, and picks the remarks that a user sees when the run starts."""

from __future__ import annotations

from collections.abc import Iterator

from flotilla.common.v1.finding_pb2 import Finding
from flotilla.coordinator.v1 import run_pb2
from flotilla_core.findings import info, warning

Line = tuple[str, str, str]
"""Name, value and explanation."""

STARTING_WEIGHTS = "starting weights"


def shown_bytes(number: float) -> str:
    """Write a number of bytes in the largest unit that leaves at least one, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def remarks(plan: run_pb2.Plan) -> Iterator[Finding]:
    """Return the weights that the run starts from, and every warning."""
    for line in plan.lines:
        if line.name == STARTING_WEIGHTS:
            yield info(f"{line.name}: {line.value} ({line.explanation})")
    yield from map(warning, plan.warnings)
