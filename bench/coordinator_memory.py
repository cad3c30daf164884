"""What many short runs cost: the most memory that the coordinator of one stack ever held, and how it grows.

Everything but the engine and the trainer is real. Each run has three steps, its plots and its report, as any run has.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import yaml
from table import Row

from flotilla_client import SyncClient
from flotilla_testing.peak_memory import most_memory_kib
from flotilla_testing.stack import Stack, example_model, light_stack, wait_until

RUNS = int(os.environ.get("FLOTILLA_BENCH_RUNS", "310"))
LOOKS = 10
"""How often the memory is looked at meanwhile."""
BAR_MIB = 400.0
LIMIT_S = 120.0


def measure() -> list[Row]:
    """Peak memory of the coordinator after all runs, and after a part of them."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        directory = Path(folder)
        model = example_model(directory, positions=256)
        with light_stack(model, directory, sim={"response_tokens": 16}) as stack:
            peaks = _peaks_mib(stack, _run_file(directory))
    grown = ", ".join(f"{peak:.0f}" for peak in peaks.values())
    last = peaks[RUNS]
    return [
        Row(
            f"coordinator, {RUNS} runs of 3 steps: peak memory",
            f"{last:.0f} MiB",
            f"<= {BAR_MIB:g} MiB",
            last <= BAR_MIB,
        ),
        Row(f"  the same after {', '.join(map(str, peaks))} runs", f"{grown} MiB"),
    ]


def _peaks_mib(stack: Stack, file: Path) -> dict[int, float]:
    """Return the peak of the memory by the number of runs that had ended."""
    pid = stack.process("coordinator").pid
    looks = {max(1, RUNS * look // LOOKS) for look in range(LOOKS + 1)}
    peaks: dict[int, float] = {}
    with stack.client() as client:
        for count in range(1, RUNS + 1):
            _finish_a_run(client, file)
            if count in looks:
                peaks[count] = most_memory_kib(pid) / 1024
    return peaks


def _finish_a_run(client: SyncClient, file: Path) -> None:
    run_id = client.start_run(file).run_id
    wait_until("the run's end", lambda: client.get_run(run_id).HasField("ended_at"), LIMIT_S)


def _run_file(directory: Path) -> Path:
    data = directory / "sums.jsonl"
    data.write_text("".join(f'{{"prompt": "{a}+7=", "answer": "{a + 7}"}}\n' for a in range(100)))
    run = {
        "name": "short",
        "steps": 3,
        "data": {"train": str(data)},
        "rollout": {
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "sampling": {"max_response_tokens": 16},
        },
        "rewards": [{"reward": "exact"}],
        "evaluation": {"data": str(data), "max_prompts": 8, "every_steps": 3},
        "weights": {"canary": {"prompts": 0}},
        "export_final": False,
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path
