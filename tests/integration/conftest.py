"""One real stack for the whole session: vLLM, a two-rank FSDP2 trainer, rewards, coordinator, NATS."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flotilla_testing.stack import Stack, running_stack

# What these tests share is found by its name, also by vLLM's workers.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def stack(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The default fleet, up once for all tests that share it."""
    description = {
        "name": "integration",
        "model": str(arithmetic / "model"),
        "trainer": {"nproc": 2},
        "generator": {"replicas": 1},
    }
    with running_stack(description, tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Path:
    """A small GRPO run on the example's data."""
    run = {
        "name": "short",
        "steps": 3,
        "data": {"train": str(arithmetic / "data" / "rl.jsonl")},
        "rollout": {
            "prompts_per_step": 16,
            "samples_per_prompt": 4,
            "sampling": {"max_response_tokens": 6},
        },
        "rewards": [{"reward": "exact"}],
        "optimizer": {"learning_rate": 1.0e-4, "schedule": "constant"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path
