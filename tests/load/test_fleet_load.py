"""Sixty-four generators on one machine: minutes each, and a machine with nothing else to do; their own target."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_testing.fleet_load import FleetLoad, measure

pytestmark = pytest.mark.timeout(3600)

LARGE = FleetLoad()
CARRIED = 1000
"""Samples a second that one coordinator carries where the machine has the time."""
BUSY = 0.8
"""Share of all cores; where they are as busy, the machine is the limit. `make bench` holds the bars of speed."""
LATEST_TURN_S = 0.25
"""Late turns of the event loop stay far below the limits of heartbeats and leases."""


def test_64_generators_are_kept_busy_by_one_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = measure(LARGE, tmp_path)
    show(capsys, f"64 generators: {figures}")
    assert figures.issued_again == 0
    cores_busy = figures.rate / 1000 * figures.all_cpu_seconds / (os.cpu_count() or 1)
    assert figures.rate >= CARRIED or cores_busy >= BUSY, f"{cores_busy:.2f} of the cores were busy"
    assert figures.coordinator_mib <= 400
    assert figures.lag_p99_s <= LATEST_TURN_S


def test_a_sample_costs_the_same_whatever_the_number_of_generators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu: dict[int, float] = {}
    for replicas, processes in ((1, 1), (8, 4), (64, 8)):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        figures = measure(replace(LARGE, replicas=replicas, processes=processes), folder)
        show(capsys, f"{replicas} generators: {figures.all_cpu_seconds:.3f} s for 1,000 samples: {figures}")
        cpu[replicas] = figures.all_cpu_seconds
    assert max(cpu.values()) <= 1.5 * min(cpu.values()), cpu


def show(capsys: pytest.CaptureFixture[str], figures: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{figures}\n")
