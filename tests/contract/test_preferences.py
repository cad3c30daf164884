"""Runs on pairs of answers go from their data to their end on a fleet that generates nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def without_generators(fleet: Stack) -> Iterator[Stack]:
    """The fleet, which has no generator until the tests of this module are over."""
    with fleet.client() as client:
        client.scale(SERVICE_KIND_GENERATOR, 0)
        assert not fleet.holders(SERVICE_KIND_GENERATOR)
        yield fleet
        client.scale(SERVICE_KIND_GENERATOR, 1)


def run_file(folder: Path, pairs: list[dict[str, Any]], **changes: Any) -> Path:
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = {
        "name": "pairs",
        "steps": 4,
        "algorithm": {"type": "dpo"},
        "data": {"train": str(data)},
        "rollout": {"prompts_per_step": 8},
        "evaluation": {"data": str(data), "every_steps": 2},
        "checkpoint": {"every_steps": 2},
        "export_final": False,
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(run | changes))
    return file


def pair(number: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": str(number)} | changes


@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_pairs_train_are_evaluated_and_kept_without_a_generator(
    without_generators: Stack, tmp_path: Path, algorithm: str
) -> None:
    file = run_file(tmp_path, [pair(n) for n in range(20)], algorithm={"type": algorithm})
    run = without_generators.run(file)
    assert run["state"] == "succeeded", run["reason"]
    steps = without_generators.metrics(run)
    assert len(steps) == 4
    # 8 pairs: two answers each, every one with its end.
    assert all(step["tokens/trained"] >= 8 * 2 * 2 for step in steps)
    assert not any(name.startswith("sync/") for step in steps for name in step)
    directory = Path(run["directory"])
    lines = [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["accuracy"]) for line in lines] == [(0, 0.5), (2, 0.5), (4, 0.5)]
    assert sorted(path.name for path in (directory / "checkpoints").glob("step-*")) == [
        "step-000002",
        "step-000004",
    ]


def test_a_pair_that_is_none_is_refused_by_its_line_before_the_run_begins(
    without_generators: Stack, tmp_path: Path
) -> None:
    for broken, said in (
        ({"rejected": "2"}, "both answers are the same"),
        ({"rejected": ""}, "column 'rejected' is an empty answer"),
        ({"rejected": None}, "column 'rejected' is missing"),
    ):
        outcome = without_generators.flotilla(
            "run", "start", str(run_file(tmp_path, [pair(0), pair(1, **broken)]))
        )
        assert outcome.code != 0
        assert said in outcome.err
        assert "pairs.jsonl, line 2" in outcome.err
