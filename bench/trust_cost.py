"""What 1,000 samples cost: CPU seconds of all processes of a fleet in which nothing decodes and nothing trains.

The fleet is that of `loop_overhead`, so the share of calls, and of the trust between services, is as large as it gets.
A run makes one figure, of the tree that it runs in. To compare two trees, let runs of both alternate and pair their
lines of JSON.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from loop_overhead import RESPONSE_TOKENS, measured
from table import Row

from flotilla_testing.stack import example_model, light_stack


def measure() -> list[Row]:
    """The figure, which is printed as a line of JSON as well, with the share of each kind of process."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        directory = Path(folder)
        model = example_model(directory, positions=2 * RESPONSE_TOKENS)
        with light_stack(model, directory, sim={"response_tokens": RESPONSE_TOKENS}) as stack:
            figures = measured(stack, prompts=64, samples=8)
    seconds = sum(figures.cpu_seconds.values())
    line = {"cpu_seconds": seconds, "by_kind": figures.cpu_seconds, "samples_per_second": figures.rate}
    print(json.dumps(line), flush=True)
    return [Row("CPU per 1,000 samples, all processes", f"{seconds:.3f} s")]
