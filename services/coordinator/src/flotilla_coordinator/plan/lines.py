"""What the lines of a plan are made of, and what of it a user should read when the run starts, without having asked."""

from __future__ import annotations

from collections.abc import Iterator

from flotilla.coordinator.v1 import run_pb2

Line = tuple[str, str, str]
"""Name, value, explanation."""

STARTING_WEIGHTS = "starting weights"


def shown_bytes(number: float) -> str:
    """In the largest unit that leaves at least one of it, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def remarks(plan: run_pb2.Plan) -> Iterator[tuple[run_pb2.NoticeLevel.ValueType, str]]:
    """The weights that the run starts from, and every warning."""
    for line in plan.lines:
        if line.name == STARTING_WEIGHTS:
            yield run_pb2.NOTICE_LEVEL_INFO, f"{line.name}: {line.value} ({line.explanation})"
    for warning in plan.warnings:
        yield run_pb2.NOTICE_LEVEL_WARNING, warning
