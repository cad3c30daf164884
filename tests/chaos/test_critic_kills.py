"""A critic that dies under its run: both learners go on from one checkpoint, and nobody learns twice from a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla_core.checkpoint import CheckpointShelf
from flotilla_testing.fault_victims import rank_of
from flotilla_testing.runs import ppo_run
from flotilla_testing.stack import Stack, sim_stack, wait_until

pytestmark = pytest.mark.timeout(600)

STEPS = 12
SAMPLES = 8
LEARNED = ("critic/loss", "critic/value_mean", "loss")


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    gangs = {"trainer": {"nproc": 1}, "critic": {"replicas": 1, "nproc": 2}}
    with sim_stack(arithmetic / "model", tmp_path_factory.mktemp("critic"), **gangs) as running:
        yield running


@pytest.fixture
def run_file(arithmetic: Path, tmp_path: Path) -> Path:
    return ppo_run(arithmetic / "data" / "rl.jsonl", tmp_path)


def ended(fleet: Stack, run: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = fleet.flotilla("run", "watch", run["run_id"], "--json").json
    return shown


def judged(fleet: Stack, run: dict[str, Any]) -> None:
    """Nothing lost, nothing trained twice; what was made again was made of the same numbers."""
    verdict = assert_accounted_for(fleet, run["run_id"])
    assert verdict.trained == (STEPS - 1) * SAMPLES and verdict.dropped == {"critic_only": SAMPLES}
    made: dict[float, dict[str, float]] = {}
    for line in fleet.metrics(run):
        learned = {name: line[name] for name in LEARNED if name in line}
        assert learned == pytest.approx(made.setdefault(line["step"], learned), rel=1e-4, abs=1e-6)
    assert sorted(made) == list(range(STEPS))


def test_a_run_whose_critic_is_killed_goes_on_by_itself(fleet: Stack, run_file: Path) -> None:
    run = fleet.ok("run", "start", str(run_file), f"steps={STEPS}", "checkpoint.every_steps=3")
    wait_until("four steps", lambda: len(fleet.metrics(run)) >= 4, 120)
    rank_of(fleet, 0, "critic").kill()
    wait_until("the run to go on", lambda: fleet.metrics(run)[-1]["lineage"] == 1, 120)
    wait_until("two more steps", lambda: fleet.metrics(run)[-1]["step"] >= 7, 120)
    fleet.process("critic").kill()
    finished = ended(fleet, run)
    assert finished["state"] == "succeeded", finished["reason"]
    assert finished["policy_version"] == f"2.{STEPS - 1}"
    judged(fleet, run)


def test_a_checkpoint_whose_critic_is_damaged_is_used_by_neither(fleet: Stack, run_file: Path) -> None:
    run = fleet.ok(
        "run", "start", str(run_file), f"steps={STEPS}", "checkpoint.every_steps=2", "resume=by_user"
    )
    shelf = CheckpointShelf(Path(run["directory"]) / "checkpoints")
    wait_until("two checkpoints", lambda: len(shelf.names()) == 2, 120)
    for name in ("coordinator", "trainer", "critic"):
        fleet.process(name).kill()
    fleet.ok("down")
    newest = shelf.names()[-1]
    damaged = next((shelf.folder(newest) / "critic" / "shards").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    fleet.ok("up")
    resumed = fleet.flotilla("run", "resume", run["run_id"], "--wait", "--json")
    assert resumed.code == 0, resumed.err
    assert (
        f"checkpoint {newest} is not used" in resumed.err and f"critic/shards/{damaged.name}" in resumed.err
    )
    assert resumed.json["policy_version"] == f"1.{STEPS - 1}"
    judged(fleet, run)
