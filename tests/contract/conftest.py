"""A light fleet for the tests of this folder: it boots in seconds and trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_testing.stack import Stack, light_stack


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Simulated engine, accepting trainer, real coordinator, rewards, NATS and launcher."""
    with light_stack(arithmetic / "model", tmp_path_factory.mktemp("light")) as running:
        yield running


@pytest.fixture(scope="session")
def small_run(arithmetic: Path) -> Callable[[str, int], dict[str, Any]]:
    """A run of small steps by its name and their number."""

    def described(name: str, steps: int) -> dict[str, Any]:
        return {
            "name": name,
            "steps": steps,
            "data": {"train": str(arithmetic / "data" / "rl.jsonl")},
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "sampling": {"max_response_tokens": 6},
            },
            "rewards": [{"reward": "exact"}],
            "weights": {"canary": {"prompts": 0}},
            "export_final": False,
        }

    return described
