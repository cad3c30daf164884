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


def small_run(
    example: Path, file: Path, *, name: str = "short", steps: int = 3, reward: str = "exact"
) -> Path:
    """Written to `file`; `example` holds the folder `data` that the arithmetic example makes."""
    run: dict[str, Any] = {
        "name": name,
        "steps": steps,
        "data": {"train": str(example / "data" / "rl.jsonl")},
        "rollout": {
            "prompts_per_step": 16,
            "samples_per_prompt": 4,
            "sampling": {"max_response_tokens": 6},
        },
        "rewards": [{"reward": reward}],
        "optimizer": {"learning_rate": 1.0e-4, "schedule": "constant"},
    }
    file.write_text(yaml.safe_dump(run))
    return file


def ppo_run(data: Path, folder: Path) -> Path:
    """Return the file of a run of three steps of eight samples; only the critic learns in the first, each is kept."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    optimizer = {"learning_rate": 1.0e-3, "schedule": "constant", "epsilon": 1.0e-3}
    run: dict[str, Any] = {
        "name": "ppo",
        "steps": 3,
        "data": {"train": str(data)},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "sampling": {"max_response_tokens": 6},
        },
        "rewards": [{"reward": f"{reward}:reward"}],
        "optimizer": optimizer,
        "algorithm": {
            "type": "ppo",
            "critic": {"optimizer": optimizer, "warmup_steps": 1},
            # The simulated engine's log-probabilities are not those of any policy.
            "correction": {"warn_at": None, "fail_at": None},
        },
        "weights": {"canary": {"prompts": 0}},
        "checkpoint": {"every_steps": 1, "keep": 2},
        "export_final": False,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def endless_run(
    stack: Stack, *, prompts: int, samples: int, max_staleness: int, longest_response: int
) -> Path:
    """Write its file into the stack's folder; a group has `samples` answers to one of `prompts` sums per step."""
    data = stack.directory / "prompts.jsonl"
    with data.open("w") as file:
        for a, b in itertools.product(range(100), range(100)):
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    run: dict[str, Any] = {
        "name": "endless",
        "steps": 20_000,
        "data": {"train": str(data)},
        # One sample has no group to be compared with.
        "algorithm": {"advantage": {"baseline": "group" if samples > 1 else "batch"}},
        "rollout": {
            "prompts_per_step": prompts,
            "samples_per_prompt": samples,
            "max_staleness": max_staleness,
            "sampling": {"max_response_tokens": longest_response},
        },
        "rewards": [{"reward": "exact"}],
        "weights": {"canary": {"prompts": 0}},
        "export_final": False,
    }
    path = stack.directory / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def live_checks(steps: Iterable[dict[str, float]]) -> set[float]:
    """Return the largest difference of each live check of these steps; a step without one repeats the one before."""
    return {step["canary/max"] for step in steps if "canary/max" in step}


def unknown_metrics(lines: Iterable[dict[str, float]]) -> set[str]:
    """Find the metrics in lines of `metrics.jsonl` that the table of metrics does not have."""
    named = (re.sub(r"<.*?>", ".*", re.escape(metric.name)) for metric in METRICS)
    known = re.compile("|".join((*named, "step", "lineage", "time")))
    return {name for line in lines for name in line if not known.fullmatch(name)}
