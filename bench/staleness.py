"""What asynchrony buys, and what it costs: the same task at several `max_staleness`, generation as slow as training.

Both are held back to one pace by waiting, not by work, so that a small machine shows what the loop overlaps and not how
its cores are shared. As it is: the simulated engine, two values, about a minute. With `FLOTILLA_BENCH_FULL=1`: a slowed
vLLM and four values on the arithmetic example, from one warm-up, each until it has learned it; about an hour on two
cores. Seconds of evaluations and checkpoints are left out everywhere. The ledger of every run is judged by its checker,
which knows the staleness of each sample from the event log: where it finds anything wrong there are no figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from table import Row

from flotilla_coordinator.ledger.checker import Verdict, check
from flotilla_testing.stack import Stack, running_stack, sim_stack

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "arithmetic"
FULL = os.environ.get("FLOTILLA_BENCH_FULL") == "1"
SHORT_PACE_S = 0.5
FULL_PACE_S = float(os.environ.get("FLOTILLA_BENCH_PACE_S", "2.0"))
"""Seconds for the generation of a step, and for its update."""
TRAINER_WAITS = 0.8
"""Share of the pace that an update waits; the rest is the work that it really does."""
LEARNED = 0.90
BAR = 1.6
FIRST_STEPS = 5
"""Left out of the rate: the line fills, and caches are cold."""
SHORT_STEPS = 20
RUN_LIMIT_S = 3 * 3600.0
TOKENS = 6
ALL = (0, 1, 2, 4)
SLOWED_VLLM: dict[str, Any] = {"max_model_tokens": 64, "slowed_by": {"time_to_first_token_s": FULL_PACE_S}}


@dataclass(frozen=True)
class Figures:
    """One run."""

    rate: float
    """Steps a second."""
    phases: dict[str, float]
    """Seconds of a step by what the loop did."""
    staleness_mean: float
    staleness_max: float
    ledger: list[int]
    """Samples, by its checker: trained, lost, trained twice, stale."""
    accuracies: list[float]
    seconds_to_learn: float | None

    @classmethod
    def of(
        cls, rows: list[dict[str, float]], verdict: Verdict, evaluations: list[dict[str, float]]
    ) -> Figures:
        """From what the run wrote."""
        seconds = [_seconds(row) for row in rows]
        steady = rows[FIRST_STEPS:]
        learned = [int(e["step"]) for e in evaluations if e["accuracy"] >= LEARNED]
        return cls(
            rate=len(steady) / sum(seconds[FIRST_STEPS:]),
            phases={
                name: sum(row[f"time/{name}_s"] for row in steady) / len(steady)
                for name in ("rollout", "train", "sync")
            },
            staleness_mean=sum(row["staleness/mean"] for row in rows) / len(rows),
            staleness_max=max(row["staleness/max"] for row in rows),
            ledger=[verdict.trained, verdict.lost, verdict.trained_twice, verdict.stale],
            accuracies=[e["accuracy"] for e in evaluations],
            seconds_to_learn=sum(seconds[: learned[0]]) if learned else None,
        )


def measure() -> list[Row]:
    """One block of rows for each staleness; the bar is the speed against none."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        directory = Path(folder)
        make_example(directory)
        figures = dict(_full(directory) if FULL else _short(directory))
    return [row for staleness, one in figures.items() for row in rows(staleness, one, figures[0])]


def make_example(directory: Path) -> None:
    """Its model and its data."""
    for script in ("make_model.py", "make_data.py"):
        out = directory / script.removeprefix("make_").removesuffix(".py")
        subprocess.run([sys.executable, EXAMPLE / script, "--out", out], check=True)


def rows(staleness: int, figures: Figures, synchronous: Figures | None) -> Iterator[Row]:
    """One block of the table, judged where the run without staleness is known."""
    gain = figures.rate / synchronous.rate if synchronous and staleness else None
    yield Row(
        f"max_staleness {staleness}: steps a second",
        f"{figures.rate:.3f}" if gain is None else f"{figures.rate:.3f} ({gain:.2f}x)",
        "" if gain is None else f">= {BAR}x",
        None if gain is None else gain >= BAR,
    )
    shown = ", ".join(f"{seconds:.2f}" for seconds in figures.phases.values())
    yield Row("  seconds of a step: waiting for rollouts, training, sync", shown)
    yield Row(
        "  staleness of samples: mean, max",
        f"{figures.staleness_mean:.2f}, {figures.staleness_max:.0f}",
        f"<= {staleness}",
        figures.staleness_max <= staleness,
    )
    judged = ", ".join(f"{samples:,}" for samples in figures.ledger)
    yield Row("  samples in the ledger: trained, lost, twice, stale", judged)
    if figures.accuracies:
        needed = figures.seconds_to_learn
        yield Row(
            f"  time to {LEARNED:.2f} held-out accuracy", "never" if needed is None else f"{needed:.0f} s"
        )
        yield Row(
            "  held-out accuracy: before, best, after",
            f"{figures.accuracies[0]:.3f}, {max(figures.accuracies):.3f}, {figures.accuracies[-1]:.3f}",
        )


def _short(directory: Path) -> Iterator[tuple[int, Figures]]:
    """The real loop, trainer and rewards around an engine that invents its tokens."""
    run = _run_file(
        directory,
        {
            "name": "staleness",
            "steps": SHORT_STEPS,
            "rollout": {
                "prompts_per_step": 16,
                "samples_per_prompt": 4,
                "sampling": {"max_response_tokens": TOKENS},
            },
            "optimizer": {"schedule": "constant", "warmup_updates": 0},
            "rewards": [{"reward": "exact"}],
        },
        SHORT_PACE_S,
        correction={"warn_at": None, "fail_at": None},
    )
    sim = {"sim": {"time_to_first_token_s": SHORT_PACE_S}}
    with sim_stack(directory / "model", directory, generator=sim) as stack:
        for staleness in (0, 1):
            yield staleness, _trained(stack, run, f"rollout.max_staleness={staleness}")


def _full(directory: Path) -> Iterator[tuple[int, Figures]]:
    description = {"name": "bench", "model": str(directory / "model"), "generator": SLOWED_VLLM}
    with running_stack(description, directory) as stack:
        start = warmed_up(stack, directory)
        for staleness in ALL:
            yield staleness, learned(stack, directory, staleness, start)


def warmed_up(stack: Stack, directory: Path) -> Path:
    """Return the example's warm-up: the weights that every staleness starts from."""
    warm_up = directory / "warm-up.yaml"
    warm_up.write_text(yaml.safe_dump(_example("sft.yaml", directory)))
    return Path(stack.run(warm_up, timeout_s=RUN_LIMIT_S)["directory"]) / "model"


def learned(stack: Stack, directory: Path, staleness: int, weights: Path, *overrides: str) -> Figures:
    """The example with its longer schedule, the pace, and evaluations that are close enough to tell times apart."""
    example = _example("grpo.yaml", directory) | yaml.safe_load((EXAMPLE / "longer.yaml").read_text())
    evaluation = {**example["evaluation"], "every_steps": 10}
    stop = {"accuracy_at_least": LEARNED}
    run = _run_file(directory, {**example, "evaluation": evaluation, "stop": stop}, FULL_PACE_S)
    asked = (f"rollout.max_staleness={staleness}", f"initial_weights={weights}", *overrides)
    return _trained(stack, run, *asked)


def _example(name: str, directory: Path) -> dict[str, Any]:
    """Return a run file of the example over the data that was made here."""
    run: dict[str, Any] = yaml.safe_load((EXAMPLE / name).read_text())
    for section, key in (("data", "train"), ("evaluation", "data")):
        run[section][key] = str(directory / "data" / Path(run[section][key]).name)
    return run


def _run_file(directory: Path, run: dict[str, Any], pace_s: float, **algorithm: Any) -> Path:
    held_back = {
        "type": f"{HERE / 'held_back.py'}:group_relative",
        "parameters": {"seconds": TRAINER_WAITS * pace_s},
    }
    whole = {
        **run,
        "data": {"train": str(directory / "data" / "rl.jsonl")},
        "algorithm": {"type": "grpo", "advantage": held_back, **algorithm},
        # Canaries would wait as long as every other sample.
        "weights": {"canary": {"prompts": 0}},
        "checkpoint": {"every_steps": 0},
        "export_final": False,
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(whole))
    return path


def _trained(stack: Stack, run: Path, *overrides: str) -> Figures:
    ended = stack.run(run, *overrides, timeout_s=RUN_LIMIT_S)
    assert ended["state"] == "succeeded", ended["reason"]
    verdict = check(stack.directory / "ledger.sqlite", ended["run_id"])
    assert verdict.passed, str(verdict)
    told = Path(ended["directory"]) / "evaluations.jsonl"
    evaluations = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    return Figures.of(stack.metrics(ended), verdict, evaluations)


def _seconds(row: dict[str, float]) -> float:
    """Return a step without its evaluation."""
    return row["time/step_s"] - row.get("time/evaluate_s", 0.0)
