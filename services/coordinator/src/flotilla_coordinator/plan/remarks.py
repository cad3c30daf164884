"""What of a plan a user should read when the run starts, without having asked for the plan."""

from __future__ import annotations

from collections.abc import Iterator

from flotilla.coordinator.v1 import run_pb2

STARTING_WEIGHTS = "starting weights"


def remarks(plan: run_pb2.Plan) -> Iterator[tuple[run_pb2.NoticeLevel.ValueType, str]]:
    """The weights that the run starts from, and every warning."""
    for line in plan.lines:
        if line.name == STARTING_WEIGHTS:
            yield run_pb2.NOTICE_LEVEL_INFO, f"{line.name}: {line.value} ({line.explanation})"
    for warning in plan.warnings:
        yield run_pb2.NOTICE_LEVEL_WARNING, warning
