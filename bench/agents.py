"""What hundreds of agents at once cost: requests a second, the gateway's own time of one, memory and CPU.

`python bench/run.py agents` has 512 agents over 8 simulated generators, at as many requests as the host carries, and at
100 a second for the time of a request. Each fleet's figures are also printed as a line of JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from table import Row

from flotilla_testing.agent_load import AgentLoad
from flotilla_testing.episode_load import EpisodeFigures
from flotilla_testing.episode_load import measure as measured

SECONDS = float(os.environ.get("FLOTILLA_BENCH_SECONDS", "60"))
LOAD = AgentLoad(seconds=SECONDS)
CALM = replace(LOAD, token_s=5.12 / 64)
"""512 requests in 5.12 seconds: 100 a second."""
RATE_BAR = 150.0
P99_BAR_S = 0.1
MEMORY_BAR_MIB = 400.0


def measure() -> list[Row]:
    """Return the figures of both fleets against the bars."""
    full, calm = _figures(LOAD), _figures(CALM)
    parts = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in full.cpu_seconds.items())
    p50_ms, p99_ms = 1000 * calm.beside_decoding_p50_s, 1000 * calm.beside_decoding_p99_s
    return [
        Row(
            f"{full.playing:,.0f} agents at once, {LOAD.replicas} generators",
            f"{full.rate:,.0f} requests/s",
            f">= {RATE_BAR:,.0f}",
            full.rate >= RATE_BAR,
        ),
        Row(
            f"  CPU per 1,000 requests: environment with its agents ({parts}; a fixed loop {full.slower:.2f} times as "
            "long)",
            f"{full.cpu_seconds['environment']:.2f} s",
        ),
        Row(
            f"  memory of the environment service and {LOAD.agents} processes of agents",
            f"{full.environment_mib:.0f} MiB",
            f"<= {MEMORY_BAR_MIB:.0f}",
            full.environment_mib <= MEMORY_BAR_MIB,
        ),
        Row("  episodes and turns again", f"{full.again}", "0", full.again == 0),
        Row("  histories that did not go on", f"{full.branches}", "0", full.branches == 0),
        Row(
            f"a request beside its decoding, at {calm.rate:,.0f} requests/s: p99",
            f"{p99_ms:.1f} ms",
            f"<= {1000 * P99_BAR_S:.0f}",
            calm.beside_decoding_p99_s <= P99_BAR_S,
        ),
        Row("  median", f"{p50_ms:.1f} ms"),
    ]


def _figures(load: AgentLoad) -> EpisodeFigures:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        figures = measured(load, Path(folder))
    print(json.dumps({"generators": load.replicas, "token_s": load.token_s} | asdict(figures)), flush=True)
    return figures
