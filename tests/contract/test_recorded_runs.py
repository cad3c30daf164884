"""A run records its samples, and another one trains on the record, on a fleet that generates nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla_testing.runs import unknown_metrics, written
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)
STEPS = 3
TinyRun = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def recording(fleet: Stack, tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of rollouts of a run."""
    described = tiny_run("recording", STEPS)
    described["rollout"]["record"] = True
    run = fleet.run(written(tmp_path_factory.mktemp("recording"), described))
    assert run["state"] == "succeeded", run["reason"]
    return Path(run["directory"]) / "rollouts"


def later_run(tiny_run: TinyRun, recording: Path, **changes: Any) -> dict[str, Any]:
    described = tiny_run("later", STEPS)
    described["data"] = {"train": str(recording), "recorded": True, "order": "as_written"}
    described.pop("rewards")
    return described | changes


def test_a_record_holds_every_sample_that_was_trained(fleet: Stack, recording: Path) -> None:
    files = sorted(path.name for path in recording.iterdir())
    assert files == [f"step-{step:06d}.parquet" for step in range(STEPS)]
    rows = pq.read_table(recording).to_pylist()
    shown = fleet.ok("samples", recording.parent.name, "-n", "100")["samples"]
    assert [row["sample_id"] for row in rows] == [one["sample_id"] for one in shown]
    for row, one in zip(rows, shown, strict=True):
        assert (row["response"], row["reward"]) == (one["response"], one["reward"])
        assert len(row["token_ids"]) == len(row["logprobs"]) == one["tokens"]
        assert [span["version"] for span in row["versions"]] == one["policy_versions"]


def test_recorded_samples_are_written_as_traces(fleet: Stack, recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    run_id = recording.parent.name
    found = fleet.ok("samples", run_id, "--step", "1", "--to", "trace", "-o", str(file))
    assert (found["rows"], found["prompts"], found["left_out"]) == (4, 2, {})
    rows = pq.read_table(recording / "step-000001.parquet").to_pylist()
    for line, row in zip(map(json.loads, file.read_text().splitlines()), rows, strict=True):
        (turn,) = line["turns"]
        assert turn["completion_token_ids"] == row["token_ids"] and turn["per_token_logps"] == row["logprobs"]
        assert turn["prompt_token_ids"] == row["prompt_token_ids"]


def test_a_run_on_a_record_needs_neither_generator_nor_reward(
    fleet: Stack, recording: Path, tiny_run: TinyRun, tmp_path: Path
) -> None:
    file = written(tmp_path, later_run(tiny_run, recording))
    with fleet.client() as client:
        client.scale(SERVICE_KIND_GENERATOR, 0)
        try:
            run = fleet.run(file)
        finally:
            client.scale(SERVICE_KIND_GENERATOR, 1)
    assert run["state"] == "succeeded", run["reason"]
    steps = fleet.metrics(run)
    assert len(steps) == STEPS and not unknown_metrics(steps)
    rewards = [row["reward"] for row in pq.read_table(recording).to_pylist()]
    assert sum(step["reward/mean"] for step in steps) / STEPS == pytest.approx(sum(rewards) / len(rewards))
    assert not any(name.startswith(("staleness/", "sync/")) for step in steps for name in step)
    assert fleet.ok("samples", run["run_id"])["samples"] == []


def test_a_run_on_a_record_is_refused_where_it_does_not_fit(
    fleet: Stack, recording: Path, tiny_run: TinyRun, tmp_path: Path
) -> None:
    def refused(**changes: Any) -> str:
        plan = fleet.flotilla(
            "run", "plan", str(written(tmp_path, later_run(tiny_run, recording, **changes)))
        )
        assert plan.code == 2
        return " ".join(plan.err.split()) + " ".join(plan.out.split())

    rollout = later_run(tiny_run, recording)["rollout"]
    cold = {**rollout, "sampling": {**rollout["sampling"], "temperature": 0.5}}
    assert "set rollout.sampling.temperature to 1" in refused(rollout=cold)
    assert "rollout.record is about samples that are drawn" in refused(rollout=rollout | {"record": True})
    passk = {"type": "pass_at_k", "advantage": {"k": 3}}
    assert "no group has 3 samples or more" in refused(
        algorithm=passk, rollout=rollout | {"samples_per_prompt": 4}
    )


def test_the_plan_of_a_run_on_a_record_says_what_it_trains(
    fleet: Stack, recording: Path, tiny_run: TinyRun, tmp_path: Path
) -> None:
    file = written(tmp_path, later_run(tiny_run, recording, algorithm={"type": "rloo"}))
    plan = json.loads(fleet.flotilla("run", "plan", str(file), "--json").out)
    lines = {line["name"]: line for line in plan["lines"]}
    assert lines["step"]["value"] == "4 sequences"
    assert "recorded samples" in lines["step"]["explanation"]
    assert "are learned" in lines["first row"]["value"]
    assert any("recorded samples come from another policy" in text for text in plan["warnings"])


def test_samples_of_a_model_are_recorded_without_a_trainer_and_equal_those_of_a_run(
    fleet: Stack, recording: Path, arithmetic: Path, tiny_run: TinyRun, tmp_path: Path
) -> None:
    file, folder = written(tmp_path, tiny_run("drawn", 2)), tmp_path / "drawn"
    found = fleet.ok("record", str(arithmetic / "model"), str(file), "-o", str(folder))
    assert (found["steps"], found["samples"]) == (2, 8)
    drawn, trained = (
        pq.read_table(place / "step-000000.parquet").to_pylist() for place in (folder, recording)
    )
    for one, other in zip(drawn, trained, strict=True):
        for column in ("prompt_token_ids", "token_ids", "logprobs", "reward", "reward_terms", "answer"):
            assert one[column] == other[column]
    assert not any("drawn" in path.name for path in recording.parents[1].iterdir())
    # A second call draws what is missing alone.
    assert fleet.ok("record", str(arithmetic / "model"), str(file), "-o", str(folder))["steps"] == 0
    later = written(tmp_path, later_run(tiny_run, folder) | {"name": "after", "steps": 1})
    assert fleet.run(later)["state"] == "succeeded"
    refused = fleet.flotilla("record", str(arithmetic / "model"), str(later), "-o", str(folder))
    assert refused.code == 2 and "its samples are recorded already" in refused.err
