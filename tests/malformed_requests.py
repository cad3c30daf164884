"""Whatever malformed requests a service gets, they are their callers' faults, and it serves the next run as before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.fuzzed_fleet import MOST_GROWTH_MIB, SEED_VARIABLE, fuzz_fleet, seed
from flotilla_testing.stack import Stack


def assert_change_nothing(
    stack: Stack, requests: int, arithmetic: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Send so many to each service of a fleet with real ranks, and judge the services and every run of its ledger."""
    drawn = seed()
    with capsys.disabled():
        sys.stdout.write(f"\n{SEED_VARIABLE}={drawn}\n")
    report = fuzz_fleet(stack, arithmetic, folder, requests, drawn)
    verdicts = {run: check(stack.directory / "ledger.sqlite", run) for run in report.runs}
    with capsys.disabled():
        sys.stdout.write(f"{report}\n")
    assert not report.offences, str(report)
    assert not report.replaced, str(report)
    assert max(report.growth_mib.values()) < MOST_GROWTH_MIB, str(report)
    assert report.last_run["state"] == "succeeded", report.last_run["reason"]
    assert report.last_run["run_id"] in verdicts
    assert {run: str(verdict) for run, verdict in verdicts.items() if not verdict.passed} == {}
