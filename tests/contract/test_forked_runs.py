"""A run is forked on a real fleet: it continues steps, data and checkpoints of another run under its own id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_testing.runs import written
from flotilla_testing.stack import Stack

pytestmark = pytest.mark.timeout(300)
STEPS, KEPT_AT = 4, 2
TinyRun = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def original(fleet: Stack, tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    described = tiny_run("original", STEPS) | {"checkpoint": {"every_steps": KEPT_AT}}
    run = fleet.run(written(tmp_path_factory.mktemp("original"), described))
    assert run["state"] == "succeeded", run["reason"]
    return run


def prompts_by_step(fleet: Stack, run: dict[str, Any]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for one in fleet.ok("samples", run["run_id"], "-n", "100")["samples"]:
        found.setdefault(one["step"], set()).add(one["prompt"])
    return found


def checkpoints(fleet: Stack, run: dict[str, Any]) -> list[str]:
    return [one["name"] for one in fleet.ok("checkpoint", "list", run["run_id"])["checkpoints"]]


def test_a_fork_goes_on_where_its_checkpoint_was_and_shows_what_changed(
    fleet: Stack, original: dict[str, Any]
) -> None:
    forked = fleet.ok(
        "run", "fork", original["run_id"], "--from", "step-000002", "optimizer.learning_rate=0.5"
    )
    assert forked["settings"] == [{"key": "optimizer.learning_rate", "from": 1e-06, "to": 0.5}]
    with fleet.client() as client:
        ended = client.wait_run(forked["run_id"])
    assert ended.step == STEPS, ended.reason
    steps = fleet.metrics(forked)
    assert [step["step"] for step in steps] == [2, 3]
    assert {step["learning_rate"] for step in steps} == {0.5}
    prompts = prompts_by_step(fleet, original)
    assert prompts_by_step(fleet, forked) == {step: prompts[step] for step in (2, 3)}
    assert checkpoints(fleet, forked) == ["step-000002", "step-000004"]
    events = (Path(forked["directory"]) / "events.jsonl").read_text()
    assert (
        "forked from" in events and "the optimizer keeps its moments, the data goes on where it was" in events
    )
    assert len(fleet.metrics(original)) == STEPS and checkpoints(fleet, original)[0] == "step-000002"


def test_a_run_that_succeeded_is_trained_further_by_a_fork(fleet: Stack, original: dict[str, Any]) -> None:
    outcome = fleet.flotilla("run", "resume", original["run_id"])
    assert f"flotilla run fork {original['run_id']} steps=N" in outcome.err
    outcome = fleet.flotilla("run", "fork", original["run_id"])
    assert outcome.code == 2 and "steps is 4, and 4 steps are done" in outcome.err
    forked = fleet.flotilla(
        "run", "fork", original["run_id"], "steps=6", "--fresh-optimizer", "--wait", "--json"
    )
    ended = json.loads(forked.out)
    assert (ended["state"], ended["step"]) == ("succeeded", 6), ended["reason"]
    # A fork is a run like any other: it can be forked, too.
    again = fleet.ok("run", "fork", ended["run_id"], "seed=3", "steps=7")
    with fleet.client() as client:
        assert client.wait_run(again["run_id"]).step == 7


def test_another_algorithm_brings_its_own_preset(fleet: Stack, original: dict[str, Any]) -> None:
    forked = fleet.ok("run", "fork", original["run_id"], "algorithm.type=rloo", "steps=5")
    changed = {one["key"]: one["to"] for one in forked["settings"]}
    assert changed["algorithm.type"] == "rloo" and changed["algorithm.loss.type"] == "reinforce"
    with fleet.client() as client:
        assert client.wait_run(forked["run_id"]).step == 5


def test_what_cannot_be_forked_is_refused_by_its_name(fleet: Stack, original: dict[str, Any]) -> None:
    for arguments, said in (
        (("--from", "step-000003"), "there is no checkpoint 'step-000003'"),
        (("--from", "best"), "the run has no best checkpoint"),
        (("lora.rank=4", "steps=9"), "lora is another one than that of the run that is forked"),
    ):
        outcome = fleet.flotilla("run", "fork", original["run_id"], *arguments)
        assert outcome.code == 2 and said in outcome.err, outcome.err
