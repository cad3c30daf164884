"""What the loop itself costs: nothing decodes and nothing trains, everything else is as in production.

The `sim` engine answers at once, the trainer only accepts; interceptors, telemetry, reward calls and the durable
ledger (`synchronous=FULL`) are on. One coordinator, one generator, one reward replica and NATS share the machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from table import Row

from flotilla_testing.runs import endless_run
from flotilla_testing.stack import Stack, StackProcesses, example_model, light_stack, wait_until

SECONDS = float(os.environ.get("FLOTILLA_BENCH_SECONDS", "60"))
WARM_UP_STEPS = 3
WARM_UP_LIMIT_S = 60.0
BACKLOG_NOISE = 64
RESPONSE_TOKENS = 512
BAR = 1500.0


@dataclass(frozen=True)
class Figures:
    """One run, from the end of its warm-up on."""

    rate: float
    """Samples a second."""
    early_backlog: float
    late_backlog: float
    cpu_seconds: dict[str, float]
    """CPU seconds per 1,000 samples, by process."""

    @property
    def backlog_is_steady(self) -> bool:
        return self.late_backlog <= self.early_backlog + BACKLOG_NOISE


def measure() -> list[Row]:
    """Samples a second in groups of 8 (the bar) and of 1, and where the CPU time goes."""
    groups = _figures(prompts=64, samples=8)
    singles = _figures(prompts=256, samples=1)
    return [
        Row(
            f"loop overhead, groups of 8, {RESPONSE_TOKENS} tokens",
            f"{groups.rate:,.0f} samples/s",
            f">= {BAR:,.0f}",
            groups.rate >= BAR and groups.backlog_is_steady,
        ),
        Row(
            "  ledger backlog, first and last third",
            f"{groups.early_backlog:.0f}, {groups.late_backlog:.0f}",
            "does not grow",
        ),
        *_cpu_rows(groups),
        Row(f"loop overhead, groups of 1, {RESPONSE_TOKENS} tokens", f"{singles.rate:,.0f} samples/s"),
        *_cpu_rows(singles),
    ]


def _cpu_rows(figures: Figures) -> list[Row]:
    used = {"all": sum(figures.cpu_seconds.values()), **figures.cpu_seconds}
    return [Row(f"  CPU per 1,000 samples: {name}", f"{seconds:.3f} s") for name, seconds in used.items()]


def _figures(prompts: int, samples: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        directory = Path(folder)
        model = example_model(directory, positions=2 * RESPONSE_TOKENS)
        with light_stack(model, directory, sim={"response_tokens": RESPONSE_TOKENS}) as stack:
            return measured(stack, prompts, samples)


def measured(stack: Stack, prompts: int, samples: int) -> Figures:
    file = endless_run(
        stack, prompts=prompts, samples=samples, max_staleness=1, longest_response=RESPONSE_TOKENS
    )
    run = stack.ok("run", "start", str(file))
    wait_until("the warm-up steps", lambda: len(stack.metrics(run)) >= WARM_UP_STEPS, WARM_UP_LIMIT_S)
    first = len(stack.metrics(run))
    processes = StackProcesses(stack.directory)
    before = processes.cpu_seconds()
    time.sleep(SECONDS)
    after = processes.cpu_seconds()
    steps = stack.metrics(run)[first - 1 :]
    stack.ok("run", "stop", run["run_id"])
    return _evaluate(steps, prompts * samples, {name: after[name] - before[name] for name in after})


def _evaluate(steps: list[dict[str, float]], samples_per_step: int, cpu: dict[str, float]) -> Figures:
    samples = samples_per_step * (len(steps) - 1)
    backlog = [step["ledger/backlog"] for step in steps]
    third = max(1, len(backlog) // 3)
    return Figures(
        rate=samples / (steps[-1]["time"] - steps[0]["time"]),
        early_backlog=max(backlog[:third]),
        late_backlog=max(backlog[-third:]),
        cpu_seconds={name: 1000 * seconds / samples for name, seconds in cpu.items()},
    )
