"""A small GRPO run on the data of the example: quick to learn from, and the same wherever a test needs any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def small_run(example: Path, file: Path, *, name: str = "short", steps: int = 3) -> Path:
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
        "rewards": [{"reward": "exact"}],
        "optimizer": {"learning_rate": 1.0e-4, "schedule": "constant"},
    }
    file.write_text(yaml.safe_dump(run))
    return file
