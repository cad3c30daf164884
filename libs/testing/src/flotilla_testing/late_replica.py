"""A replica that joins a run in progress: how it was taken in.

Invariant: what is known of it comes from the run's own metrics and from its timeline.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flotilla_testing.stack import Stack, wait_until

FIRST = "generator-0"
JOINER = "generator-1"
LEAST_SHARE = 0.35


def joins_without_delay(
    stack: Stack, run: dict[str, Any], folder: Path, *, steps: int, limit_s: float
) -> None:
    """A run of `FIRST` takes `JOINER` in with one sync, and gives it its share from the next step on."""
    stack.ok("scale", "generator", "2")
    share = f"generator/{JOINER}/samples"
    wait_until(
        f"{steps} steps with two replicas",
        lambda: sum(share in step for step in stack.metrics(run)) >= steps,
        limit_s,
    )
    made = stack.metrics(run)
    first = next(number for number, step in enumerate(made) if share in step)
    shared = made[first : first + steps]
    samples = [sum(step.get(f"generator/{name}/samples", 0.0) for step in shared) for name in (FIRST, JOINER)]
    assert samples[1] >= LEAST_SHARE * sum(samples)
    members = [step["sync/members"] for step in made[: first + 1]]
    assert members[-2:] == [2, 2] and 2 not in members[:-2], (
        "one sync took it in, right before its first samples"
    )
    timeline = folder / "timeline.json"
    stack.ok("timeline", run["run_id"], "-o", str(timeline))
    assert _joins_of_the_first(timeline) == 2, "the run's first sync, and the one that took the joiner in"


def _joins_of_the_first(timeline: Path) -> int:
    """Count the groups that the original replica had to form."""
    events = json.loads(timeline.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    joins = [e for e in events if e["ph"] == "X" and e["name"].endswith("GeneratorService/JoinWeightGroup")]
    return len([join for join in joins if processes[join["pid"]].startswith(FIRST)])
