"""Runs that tests start: a small one of GRPO, a small one of PPO, and one that never ends by itself."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from flotilla_core.telemetry.metrics import METRICS
from flotilla_testing.stack import Stack

# Made-up samples are never right: any number that differs between them gives gradients.
REWARD = "def reward(prompt, response, answer, info):\n    return float(sum(map(ord, response)) % 7)\n"


LEARNS = {"learning_rate": 1.0e-3, "schedule": "constant", "epsilon": 1.0e-3}
"""An optimizer that moves the weights with every sample."""
MADE_UP = {"correction": {"warn_at": None, "fail_at": None}}
"""The simulated engine's log-probabilities are not those of any policy."""
QUICK: dict[str, Any] = {"weights": {"canary": {"prompts": 0}}, "export_final": False}


def run_on(
    data: Path, name: str, steps: int, sizes: tuple[int, int, int] = (4, 4, 6), **sections: Any
) -> dict[str, Any]:
    """Return a run on the rows of `data`, with more sections; those of `rollout` are added to its sizes.

    The sizes are prompts of a step, samples of a prompt, and most tokens of a response.
    """
    prompts, samples, tokens = sizes
    rollout = {
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "sampling": {"max_response_tokens": tokens},
        **sections.pop("rollout", {}),
    }
    run = {"name": name, "steps": steps, "data": {"train": str(data)}, "rollout": rollout}
    return {**run, "rewards": [{"reward": "exact"}], **sections}


def written(folder: Path, run: dict[str, Any]) -> Path:
    """Return the file of a run in this folder."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def any_reward(folder: Path) -> list[dict[str, str]]:
    """Write a reward by which all samples differ; return the section that names it."""
    path = folder / "reward.py"
    path.write_text(REWARD)
    return [{"reward": f"{path}:reward"}]


def example_rows(example: Path) -> Path:
    """Return the prompts that the arithmetic example makes in this folder."""
    return example / "data" / "rl.jsonl"


def small_run(
    example: Path, file: Path, *, name: str = "short", steps: int = 3, reward: str = "exact"
) -> Path:
    """Written to `file`; `example` holds the folder `data` that the arithmetic example makes."""
    optimizer = {"learning_rate": 1.0e-4, "schedule": "constant"}
    run = run_on(
        example_rows(example), name, steps, (16, 4, 6), rewards=[{"reward": reward}], optimizer=optimizer
    )
    file.write_text(yaml.safe_dump(run))
    return file


def ppo_run(data: Path, folder: Path) -> Path:
    """Return the file of a run of three steps of eight samples; only the critic learns in the first, each is kept."""
    algorithm = {"type": "ppo", "critic": {"optimizer": LEARNS, "warmup_steps": 1}, **MADE_UP}
    learning = {"optimizer": LEARNS, "algorithm": algorithm, "rewards": any_reward(folder)}
    checkpoint = {"every_steps": 1, "keep": 2}
    return written(folder, run_on(data, "ppo", 3, (4, 2, 6), checkpoint=checkpoint, **learning, **QUICK))


def endless_run(
    stack: Stack,
    *,
    prompts: int,
    samples: int,
    max_staleness: int,
    longest_response: int,
    shortest_response: int = 0,
    **sections: Any,
) -> Path:
    """Write its file into the stack's folder; a group has `samples` answers to one of `prompts` sums per step."""
    data = stack.directory / "prompts.jsonl"
    with data.open("w") as file:
        for a, b in itertools.product(range(100), range(100)):
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    # One sample has no group to be compared with.
    algorithm = {"advantage": {"baseline": "group" if samples > 1 else "batch"}}
    sizes = (prompts, samples, longest_response)
    lengths = {"max_response_tokens": longest_response, "min_response_tokens": shortest_response}
    rollout = {"max_staleness": max_staleness, "sampling": lengths}
    run = run_on(data, "endless", 20_000, sizes, rollout=rollout, algorithm=algorithm, **QUICK, **sections)
    return written(stack.directory, run)


def live_checks(steps: Iterable[dict[str, float]]) -> set[float]:
    """Return the largest difference of each live check of these steps; a step without one repeats the one before."""
    return {step["canary/max"] for step in steps if "canary/max" in step}


def unknown_metrics(lines: Iterable[dict[str, float]]) -> set[str]:
    """Find the metrics in lines of `metrics.jsonl` that the table of metrics does not have."""
    named = (re.sub(r"<.*?>", ".*", re.escape(metric.name)) for metric in METRICS)
    known = re.compile("|".join((*named, "step", "lineage", "time")))
    return {name for line in lines for name in line if not known.fullmatch(name)}
