"""What thousands of episodes in flight cost: turns a second, CPU and memory of the coordinator, its own time of a turn.

`python bench/run.py episodes` takes 4,096 episodes over 8 and over 64 simulated generators, and 250 turns a second
for the time of a turn. Each fleet's figures are also printed as a line of JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from table import Row

from flotilla_testing.episode_load import EpisodeFigures, EpisodeLoad
from flotilla_testing.episode_load import measure as measured

SECONDS = float(os.environ.get("FLOTILLA_BENCH_SECONDS", "60"))
LOAD = EpisodeLoad(seconds=SECONDS)
MANY = replace(LOAD, replicas=64, processes=8)
CALM = replace(LOAD, shortest_turn=48, token_s=0.22, update_s=8.192)
"""Each update admits 512 episodes of four turns: 250 turns a second, of 10 to 18 seconds."""
RATE_BAR, RATE_GOAL = 400.0, 1000.0
CPU_BAR_S = 1.5
MEMORY_BAR_MIB = 800.0
P99_BAR_S = 0.02


def measure() -> list[Row]:
    """Return the figures of both fleets against the bars, then those at 250 turns a second."""
    return [
        *_rows(LOAD),
        *_rows(MANY),
        *_calm_rows(_figures(CALM)),
    ]


def _rows(load: EpisodeLoad) -> list[Row]:
    figures = _figures(load)
    coordinator_s = figures.cpu_seconds["coordinator"]
    parts = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in figures.cpu_seconds.items())
    return [
        Row(
            f"{figures.playing:,.0f} episodes in flight, {load.replicas} generators",
            f"{figures.rate:,.0f} turns/s",
            f">= {RATE_BAR:,.0f} (goal {RATE_GOAL:,.0f})",
            figures.rate >= RATE_BAR,
        ),
        Row(
            f"  CPU per 1,000 turns: coordinator ({parts}; a fixed loop {figures.slower:.2f} times as long)",
            f"{coordinator_s:.2f} s",
            f"<= {CPU_BAR_S}",
            coordinator_s <= CPU_BAR_S,
        ),
        Row(
            "  memory of the coordinator",
            f"{figures.coordinator_mib:.0f} MiB",
            f"<= {MEMORY_BAR_MIB:.0f}",
            figures.coordinator_mib <= MEMORY_BAR_MIB,
        ),
        Row("  episodes and turns again", f"{figures.again}", "0", figures.again == 0),
    ]


def _calm_rows(figures: EpisodeFigures) -> list[Row]:
    own_ms = 1000 * figures.coordinator_p99_s
    worst_ms, p50_ms = 1000 * figures.coordinator_worst_p99_s, 1000 * figures.coordinator_p50_s
    beside_ms = (
        f"{1000 * figures.beside_decoding_p50_s:.1f} ms, p99 {1000 * figures.beside_decoding_p99_s:.1f} ms"
    )
    return [
        Row(
            f"the coordinator's time of a turn, at {figures.rate:,.0f} turns/s: p99, median of the steps",
            f"{own_ms:.1f} ms",
            f"<= {1000 * P99_BAR_S:.0f}",
            figures.coordinator_p99_s <= P99_BAR_S,
        ),
        Row("  of the worst step", f"{worst_ms:.1f} ms"),
        Row("  median", f"{p50_ms:.1f} ms"),
        Row("  with environment, generator and wire, beside decoding: median", beside_ms),
        Row("  lag of the event loop, p99 of a step: median", f"{1000 * figures.lag_p99_s:.0f} ms"),
    ]


def _figures(load: EpisodeLoad) -> EpisodeFigures:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        figures = measured(load, Path(folder))
    print(json.dumps({"generators": load.replicas, "token_s": load.token_s} | asdict(figures)), flush=True)
    return figures
