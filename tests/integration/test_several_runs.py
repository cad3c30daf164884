"""Two runs share a fleet: a trainer each, generators by their shares, rewards together.

Simulated engines and trainers that accept, behind the real coordinator, ledger, weight groups and launcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.stack import Stack, light_stack, wait_until

pytestmark = pytest.mark.timeout(400)

USAGE, PREFLIGHT = 2, 5
WAIT_S = 120.0


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("several")
    trainers = ("trainer-0", "trainer-1")
    sim = {"seconds_per_token": 0.005}
    with light_stack(arithmetic / "model", directory, trainers=trainers, replicas=3, sim=sim) as running:
        yield running


def shares(fleet: Stack) -> Counter[str]:
    with fleet.client() as client:
        services = client.list_services()
    return Counter(one.run_id for one in services if one.registration.name.startswith("generator"))


def members(fleet: Stack, run: dict[str, Any]) -> float:
    metrics = fleet.metrics(run)
    return metrics[-1]["sync/members"] if metrics else 0


def started(fleet: Stack, arithmetic: Path, folder: Path, name: str) -> dict[str, Any]:
    """A run that goes on until it is told how many steps it makes."""
    file = folder / f"{name}.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": name,
                "steps": 100_000,
                "data": {"train": str(arithmetic / "data" / "rl.jsonl")},
                "rollout": {
                    "prompts_per_step": 4,
                    "samples_per_prompt": 2,
                    "max_staleness": 1,
                    "sampling": {"max_response_tokens": 6},
                },
                "rewards": [{"reward": "exact"}],
                "weights": {"canary": {"prompts": 0}},
                "export_final": False,
            }
        )
    )
    run: dict[str, Any] = fleet.ok("run", "start", str(file))
    return run


def ended(fleet: Stack, run: dict[str, Any]) -> None:
    """A few more steps, then the end; every sample of the run is accounted for."""
    with fleet.client() as client:
        client.set_run(run["run_id"], [f"steps={len(fleet.metrics(run)) + 20}"])
    wait_until(f"the end of {run['name']}", lambda: fleet.state(run) == "succeeded", WAIT_S)
    verdict = check(fleet.directory / "ledger.sqlite", run["run_id"])
    assert verdict.passed and verdict.lost == verdict.trained_twice == verdict.stale == 0, str(verdict)


def test_two_runs_go_on_side_by_side_and_the_last_one_has_the_whole_fleet(
    fleet: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    first = started(fleet, arithmetic, tmp_path, "first")
    wait_until("three members", lambda: members(fleet, first) == 3, WAIT_S)
    second = started(fleet, arithmetic, tmp_path, "second")
    for run, count in ((first, 2), (second, 1)):
        wait_until(f"{count} members", lambda run=run, count=count: members(fleet, run) == count, WAIT_S)
    assert shares(fleet) == {first["run_id"]: 2, second["run_id"]: 1}

    refused = fleet.flotilla("run", "start", str(tmp_path / "first.yaml"))
    assert refused.code == PREFLIGHT and first["run_id"] in refused.err and second["run_id"] in refused.err
    assert fleet.flotilla("scale", "generator", "1").code == USAGE

    ended(fleet, first)
    wait_until("all members", lambda: members(fleet, second) == 3, WAIT_S)
    assert shares(fleet) == {second["run_id"]: 3}
    ended(fleet, second)
    assert set(shares(fleet)) == {""}
