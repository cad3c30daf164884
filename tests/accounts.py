"""What the ledger of a stack says of a run."""

from __future__ import annotations

from flotilla_coordinator.ledger.checker import Verdict, check
from flotilla_testing.stack import Stack


def assert_accounted_for(stack: Stack, run_id: str) -> Verdict:
    """Return the verdict, by which no sample is lost, trained twice or trained too late, and all of them add up."""
    verdict = check(stack.directory / "ledger.sqlite", run_id)
    assert verdict.passed, str(verdict)
    return verdict
