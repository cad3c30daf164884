"""What a large fleet carries, and whether a sample costs the same whatever the number of generators."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from table import Row

from flotilla_testing.fleet_load import FleetLoad, LoadFigures
from flotilla_testing.fleet_load import measure as measured

SECONDS = float(os.environ.get("FLOTILLA_BENCH_SECONDS", "60"))
LARGE = FleetLoad(seconds=SECONDS)
SMALLER_FLEETS = {1: 1, 8: 4}
"""Generators: processes."""
RATE_BAR = 1000.0
OPEN_CALLS_BAR = 2048
"""Of eight samples each: 16,384 samples."""
MEMORY_BAR_MIB = 400.0
LAG_BAR_S = 0.05
FLAT_BAR = 1.5


def measure() -> list[Row]:
    """Return the largest fleet against its bars, then CPU seconds by size."""
    figures = {LARGE.replicas: _figures(LARGE)}
    for replicas, processes in SMALLER_FLEETS.items():
        figures[replicas] = _figures(replace(LARGE, replicas=replicas, processes=processes))
    cpu = {replicas: figures[replicas].all_cpu_seconds for replicas in sorted(figures)}
    growth = max(cpu.values()) / min(cpu.values())
    return [
        *_bars(figures[LARGE.replicas]),
        Row(
            "  CPU of the dearest size against the cheapest",
            f"{growth:.2f}",
            f"<= {FLAT_BAR}",
            growth <= FLAT_BAR,
        ),
        *(_cpu_row(replicas, figures[replicas]) for replicas in sorted(figures)),
    ]


def _bars(figures: LoadFigures) -> list[Row]:
    lag_ms = 1000 * figures.lag_p99_s
    return [
        Row(
            f"{LARGE.replicas} generators",
            f"{figures.rate:,.0f} samples/s",
            f">= {RATE_BAR:,.0f}",
            figures.rate >= RATE_BAR,
        ),
        Row(
            f"  open calls of {LARGE.samples} samples: mean, fewest",
            f"{figures.open_calls:,.0f}, {figures.fewest_open_calls:,}",
            f">= {OPEN_CALLS_BAR:,}",
            figures.open_calls >= OPEN_CALLS_BAR,
        ),
        Row(
            "  memory of the coordinator",
            f"{figures.coordinator_mib:.0f} MiB",
            f"<= {MEMORY_BAR_MIB:.0f}",
            figures.coordinator_mib <= MEMORY_BAR_MIB,
        ),
        Row(
            "  lag of its event loop, p99 of a step: median",
            f"{lag_ms:.0f} ms",
            f"<= {1000 * LAG_BAR_S:.0f}",
            figures.lag_p99_s <= LAG_BAR_S,
        ),
        Row("  lag of its event loop, p99 of a step: highest", f"{1000 * figures.lag_p99_worst_s:.0f} ms"),
        Row("  lag of its event loop, longest", f"{1000 * figures.longest_lag_s:.0f} ms"),
        Row("  samples issued again", f"{figures.issued_again}", "0", figures.issued_again == 0),
    ]


def _cpu_row(replicas: int, figures: LoadFigures) -> Row:
    parts = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in figures.cpu_seconds.items())
    parts += f"; a fixed loop {figures.slower:.2f} times as long"
    return Row(
        f"  CPU per 1,000 samples, {replicas} generators ({parts})", f"{figures.all_cpu_seconds:.3f} s"
    )


def _figures(load: FleetLoad) -> LoadFigures:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        return measured(load, Path(folder))
