"""Runs that lose their trainer, their coordinator or everything go on from a checkpoint, and the ledger balances.

Simulated engines, a real trainer: what it learns from made-up samples is nothing, but every number of it is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.stack import Stack, sim_stack, wait_until

pytestmark = pytest.mark.timeout(300)

STEPS = 12


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("checkpoints")
    with sim_stack(arithmetic / "model", directory, trainer={"nproc": 2}) as running:
        yield running


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Path:
    """Twelve small steps with a checkpoint after every third."""
    run: dict[str, Any] = {
        "name": "resumed",
        "steps": STEPS,
        "data": {"train": str(arithmetic / "data" / "rl.jsonl")},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_staleness": 1,
            "sampling": {"max_response_tokens": 6},
        },
        "rewards": [{"reward": "exact"}],
        "weights": {"canary": {"prompts": 0}},
        "checkpoint": {"every_steps": 3},
        "export_final": False,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def steps_of(fleet: Stack, run: dict[str, Any]) -> int:
    return len(fleet.metrics(run))


def checkpoints_of(run: dict[str, Any]) -> list[str]:
    folder = Path(run["directory"]) / "checkpoints"
    return sorted(entry.name for entry in folder.glob("step-*")) if folder.is_dir() else []


def ended(fleet: Stack, run: dict[str, Any]) -> dict[str, Any]:
    outcome = fleet.flotilla("run", "watch", run["run_id"], "--json")
    shown: dict[str, Any] = outcome.json
    return shown


def judged(fleet: Stack, run: dict[str, Any]) -> None:
    verdict = check(fleet.directory / "ledger.sqlite", run["run_id"])
    assert verdict.passed, str(verdict)
    assert verdict.lost == 0 and verdict.trained_twice == 0


def test_a_run_whose_trainer_is_killed_recovers_by_itself(fleet: Stack, run_file: Path) -> None:
    run = fleet.ok("run", "start", str(run_file))
    wait_until(
        "a checkpoint and a step after it", lambda: steps_of(fleet, run) >= 5 and checkpoints_of(run), 120
    )
    rank = next(child for child in fleet.process("trainer").children() if "--descriptor" in child.cmdline())
    rank.kill()
    wait_until("the run to go on", lambda: fleet.metrics(run)[-1]["lineage"] == 1, 120)
    wait_until("two more steps", lambda: fleet.metrics(run)[-1]["step"] >= 7, 120)
    fleet.process("trainer").kill()
    finished = ended(fleet, run)
    assert finished["state"] == "succeeded", finished["reason"]
    assert finished["policy_version"] == f"2.{STEPS}"
    judged(fleet, run)
    lineages = {line["step"]: line["lineage"] for line in fleet.metrics(run)}
    assert sorted(lineages) == list(range(STEPS)) and lineages[STEPS - 1] == 2
    assert checkpoints_of(run) == ["step-000009", "step-000012"]
