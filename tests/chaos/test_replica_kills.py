"""Replicas die again and again while nothing runs ahead of training; the run goes on and the ledger balances.

Simulated engines behind the real weight group, digests, coordinator, ledger and launcher. With rollouts that run ahead
they die in the matrix (`test_fault_matrix.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.replica_faults import PHASES, kill_inside
from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(600)

KILLS = 2
VICTIM = "generator-1"
SHARE = f"generator/{VICTIM}/samples"


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two simulated replicas that take a moment for everything, so that each phase can be met."""
    sim = {"seconds_per_token": 0.01, "commit_s": 0.05}
    directory = tmp_path_factory.mktemp("chaos")
    with light_stack(arithmetic / "model", directory, replicas=2, sim=sim) as running:
        yield running


async def test_kill_after_kill_loses_no_sample(fleet: Stack, arithmetic: Path, tmp_path: Path) -> None:
    run = fleet.ok("run", "start", str(_endless_run(arithmetic, tmp_path)))
    for kill, phase in enumerate(PHASES * KILLS):
        _wait_for_work(fleet, run, kill)
        pid = fleet.process(VICTIM).pid
        await kill_inside(fleet, VICTIM, phase)
        wait_until(f"a new process after kill {kill}", lambda pid=pid: _new_process(fleet, pid), 60)
    done = len(fleet.metrics(run))
    wait_until("five more steps", lambda: len(fleet.metrics(run)) >= done + 5, 60)
    fleet.ok("run", "stop", run["run_id"])
    wait_until("the end of the run", lambda: fleet.ok("run", "show", run["run_id"])["state"] == "stopped", 90)
    verdict = check(fleet.directory / "ledger.sqlite", run["run_id"])
    assert verdict.lost == 0 and verdict.trained_twice == 0 and verdict.stale == 0, str(verdict)
    assert verdict.passed, str(verdict)


def _wait_for_work(fleet: Stack, run: dict[str, Any], kill: int) -> None:
    """Until the victim of today has taken part in a whole step."""
    done = len(fleet.metrics(run))
    wait_until(
        f"{VICTIM} at work before kill {kill}",
        lambda: any(SHARE in step for step in fleet.metrics(run)[done + 1 :]),
        60,
    )


def _new_process(fleet: Stack, pid: int) -> bool:
    try:
        return fleet.process(VICTIM).pid != pid
    except (FileNotFoundError, psutil.NoSuchProcess):
        return False


def _endless_run(arithmetic: Path, tmp_path: Path) -> Path:
    run: dict[str, Any] = {
        "name": "kills",
        "steps": 100_000,
        "data": {"train": str(arithmetic / "data" / "rl.jsonl")},
        "rollout": {
            "prompts_per_step": 16,
            "samples_per_prompt": 4,
            "sampling": {"max_response_tokens": 12},
        },
        "rewards": [{"reward": "exact"}],
        "weights": {"canary": {"prompts": 0}, "timeout_s": 20},
        "export_final": False,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path
