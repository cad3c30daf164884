"""A run for those who measure a fleet: it makes steps for as long as it is left alone, and nothing ends but these."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import yaml

from flotilla_testing.stack import Stack


def endless_run(
    stack: Stack, *, prompts: int, samples: int, max_staleness: int, longest_response: int
) -> Path:
    """Its file, beside those of the stack; a group has `samples` answers to one of `prompts` sums a step."""
    data = stack.directory / "prompts.jsonl"
    with data.open("w") as file:
        for a, b in itertools.product(range(100), range(100)):
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    run: dict[str, Any] = {
        "name": "endless",
        "steps": 1_000_000,
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
