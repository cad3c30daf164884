"""A small run of PPO on made-up samples, for fleets whose policy and critic are real and whose engine is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# Made-up samples are never right: any number that differs between them gives gradients.
REWARD = "def reward(prompt, response, answer, info):\n    return float(sum(map(ord, response)) % 7)\n"


def ppo_run(data: Path, folder: Path) -> Path:
    """The file of a run of three steps of eight samples; only the critic learns in the first, each is kept."""
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
