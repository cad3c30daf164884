"""Runs that lose their trainer, their coordinator or everything go on from a checkpoint, and the ledger balances.

Simulated engines, a real trainer: what it learns from made-up samples is nothing, but every number of it is real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla_cli.options import PREFLIGHT, RUN_FAILED, USAGE
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_testing.fault_victims import rank_of
from flotilla_testing.runs import LEARNS, MADE_UP, QUICK, REWARD, any_reward, example_rows, run_on, written
from flotilla_testing.stack import Stack, sim_stack, wait_until

pytestmark = pytest.mark.timeout(600)

STEPS = 12


@pytest.fixture(scope="module")
def fleet(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("checkpoints")
    with sim_stack(arithmetic / "model", directory, trainer={"nproc": 2}) as running:
        yield running


@pytest.fixture(scope="module")
def run_file(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small steps with a checkpoint after every third."""
    folder = tmp_path_factory.mktemp("run")
    learning = {"rewards": any_reward(folder), "optimizer": LEARNS, "algorithm": MADE_UP}
    checkpoint = {"every_steps": 3}
    run = run_on(example_rows(arithmetic), "resumed", STEPS, checkpoint=checkpoint, **learning, **QUICK)
    return written(folder, run)


@pytest.fixture(scope="module")
def undisturbed(fleet: Stack, run_file: Path) -> dict[str, Any]:
    """The run as it goes when nothing happens to it."""
    run = fleet.run(run_file)
    assert run["state"] == "succeeded", run["reason"]
    return run


def steps_of(fleet: Stack, run: dict[str, Any]) -> int:
    return len(fleet.metrics(run))


def checkpoints_of(run: dict[str, Any]) -> list[str]:
    folder = Path(run["directory"]) / "checkpoints"
    return sorted(entry.name for entry in folder.glob("step-*")) if folder.is_dir() else []


def ended(fleet: Stack, run: dict[str, Any]) -> dict[str, Any]:
    outcome = fleet.flotilla("run", "watch", run["run_id"], "--json")
    shown: dict[str, Any] = outcome.json
    return shown


def places_of(run: dict[str, Any]) -> list[str]:
    """Which samples each step trained, without the name of the run."""
    samples = RunDirectory(Path(run["directory"])).read_samples()
    return [f"{sample['step']}:{sample['sample_id'].partition('/')[2]}" for sample in samples]


def repeated_losses(fleet: Stack, run: dict[str, Any]) -> list[tuple[float, float]]:
    """The losses of steps that were made twice, as they were and as they are."""
    first: dict[float, dict[str, float]] = {}
    pairs = []
    for line in fleet.metrics(run):
        if line["step"] in first:
            pairs.append((first[line["step"]]["loss"], line["loss"]))
        first[line["step"]] = line
    return pairs


def test_checkpoints_are_listed_exported_and_pruned_from_the_folder_alone(
    fleet: Stack, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    run = undisturbed
    listed = fleet.ok("checkpoint", "list", run["run_id"])["checkpoints"]
    assert [(one["name"], one["steps_done"]) for one in listed] == [("step-000009", 9), ("step-000012", 12)]
    fleet.ok("checkpoint", "export", run["run_id"], str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()
    again = fleet.flotilla("checkpoint", "export", run["run_id"], str(tmp_path / "model"))
    assert again.code == USAGE and "exists already" in again.err
    assert fleet.ok("checkpoint", "prune", run["run_id"], "--keep", "1")["kept"] == ["step-000012"]
    missing = fleet.flotilla("checkpoint", "verify", run["run_id"], "--checkpoint", "step-000009")
    assert missing.code == USAGE and "step-000012" in missing.err


def test_a_stopped_run_ends_with_a_checkpoint_and_goes_on_from_the_one_that_is_asked_for(
    fleet: Stack, run_file: Path
) -> None:
    run = fleet.ok("run", "start", str(run_file), "steps=1000", "checkpoint.keep=1000")
    wait_until("a checkpoint and a step after it", lambda: steps_of(fleet, run) >= 4, 120)
    fleet.ok("run", "stop", run["run_id"])
    stopped = ended(fleet, run)
    assert stopped["state"] == "stopped"
    assert checkpoints_of(run)[-1] == CheckpointShelf.name_of(stopped["step"])
    assert_accounted_for(fleet, run["run_id"])

    unknown = fleet.flotilla("run", "resume", run["run_id"], "--from", "step-000004")
    assert unknown.code == USAGE and "step-000003" in unknown.err
    fleet.ok("run", "resume", run["run_id"], "--from", "step-000003")
    wait_until("a step of the next lineage", lambda: fleet.metrics(run)[-1]["lineage"] == 1, 120)
    assert next(line for line in fleet.metrics(run) if line["lineage"] == 1)["step"] == 3
    fleet.ok("run", "stop", run["run_id"])
    assert ended(fleet, run)["state"] == "stopped"
    assert_accounted_for(fleet, run["run_id"])
    for before, after in repeated_losses(fleet, run):
        assert after == pytest.approx(before, rel=1e-5)


def test_a_run_whose_trainer_is_killed_recovers_by_itself(fleet: Stack, run_file: Path) -> None:
    """Half of the rewards are equal: groups are replaced and left over, in an order that no other run has."""
    rollout = {"max_staleness": 2, "over_issue": 0.5, "samples_per_prompt": 2, "dynamic_sampling": {}}
    reward = run_file.parent / "coin.py"
    reward.write_text(REWARD.replace("% 7", "% 2"))
    overrides = [f"rollout.{key}={json.dumps(value)}" for key, value in rollout.items()]
    run = fleet.ok("run", "start", str(run_file), f"rewards.0.reward={reward}:reward", *overrides)
    wait_until(
        "a checkpoint and a step after it", lambda: steps_of(fleet, run) >= 5 and checkpoints_of(run), 120
    )
    rank_of(fleet, 0).kill()
    wait_until("the run to go on", lambda: fleet.metrics(run)[-1]["lineage"] == 1, 120)
    wait_until("two more steps", lambda: fleet.metrics(run)[-1]["step"] >= 7, 120)
    fleet.process("trainer").kill()
    finished = ended(fleet, run)
    assert finished["state"] == "succeeded", finished["reason"]
    assert finished["policy_version"] == f"2.{STEPS}"
    assert_accounted_for(fleet, run["run_id"])
    lineages = {line["step"]: line["lineage"] for line in fleet.metrics(run)}
    assert sorted(lineages) == list(range(STEPS)) and lineages[STEPS - 1] == 2
    assert checkpoints_of(run) == ["step-000009", "step-000012"]
    for before, after in repeated_losses(fleet, run):
        assert after == pytest.approx(before, rel=1e-5)


def test_a_run_whose_coordinator_is_killed_goes_on_with_the_trainer_as_it_is(
    fleet: Stack, run_file: Path, undisturbed: dict[str, Any]
) -> None:
    run = fleet.ok("run", "start", str(run_file))
    for steps in (2, 7):
        wait_until(f"{steps} steps", lambda steps=steps: steps_of(fleet, run) >= steps, 120)
        fleet.process("coordinator").kill()
    wait_until("the coordinator's return", lambda: fleet.flotilla("run", "list").code == 0, 60)
    finished = ended(fleet, run)
    assert finished["state"] == "succeeded", finished["reason"]
    assert finished["policy_version"] == f"0.{STEPS}", "no checkpoint was loaded"
    assert_accounted_for(fleet, run["run_id"])
    assert places_of(run) == places_of(undisturbed)
    losses, first = ([line["loss"] for line in fleet.metrics(one)] for one in (run, undisturbed))
    assert losses == pytest.approx(first, rel=1e-5)


def test_a_run_goes_on_with_other_ranks_after_everything_was_killed_and_its_newest_checkpoint_damaged(
    fleet: Stack, run_file: Path, undisturbed: dict[str, Any]
) -> None:
    refused = fleet.flotilla("run", "resume", undisturbed["run_id"])
    assert refused.code == PREFLIGHT and "nothing to continue" in refused.err

    run = fleet.ok("run", "start", str(run_file), "resume=by_user")
    wait_until("steps after the second checkpoint", lambda: steps_of(fleet, run) >= 8, 120)
    wait_until("the second checkpoint", lambda: "step-000006" in checkpoints_of(run), 120)
    for name in ("coordinator", "trainer", "generator-0"):
        fleet.process(name).kill()
    fleet.ok("down")
    shelf = CheckpointShelf(Path(run["directory"]) / "checkpoints")
    newest = shelf.names()[-1]
    shard = shelf.path / newest / "shards" / "rank-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    verified = fleet.flotilla("checkpoint", "verify", run["run_id"], "--json")
    assert verified.code == RUN_FAILED
    problems = {one["name"]: one["problem"] for one in verified.json["checkpoints"]}
    assert shard.name in problems.pop(newest) and set(problems.values()) == {""}

    fleet.file.write_text(fleet.file.read_text().replace("nproc: 2", "nproc: 3"))
    fleet.ok("up")
    shown = fleet.ok("run", "show", run["run_id"])
    assert shown["state"] == "failed" and "flotilla run resume" in shown["reason"]
    resumed = fleet.flotilla("run", "resume", run["run_id"], "--wait", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["policy_version"] == f"1.{STEPS}"
    assert shard.name in resumed.err  # the user who watches the run reads it
    assert_accounted_for(fleet, run["run_id"])
    assert places_of(run) == places_of(undisturbed)
    pairs = repeated_losses(fleet, run)
    assert len(pairs) >= 5 and any(before != 0 for before, _ in pairs)
    for before, after in pairs:
        assert after == pytest.approx(before, rel=1e-5)
