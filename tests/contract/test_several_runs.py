"""Two runs share a fleet: a trainer each, and generators by their shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accounts import assert_accounted_for

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR, SERVICE_KIND_TRAINER
from flotilla_core.errors import FailedPrecondition
from flotilla_testing.runs import written
from flotilla_testing.stack import Stack, accepting_trainer, wait_until

pytestmark = pytest.mark.timeout(400)

USAGE = 2
WAIT_S = 120.0


@pytest.fixture
def larger(fleet: Stack, tmp_path: Path) -> Iterator[Stack]:
    """The fleet with a second trainer and three generators, until the test is over."""
    with accepting_trainer("trainer-1", fleet.file, tmp_path), fleet.client() as client:
        client.scale(SERVICE_KIND_GENERATOR, 3)
        wait_until("the second trainer", lambda: len(fleet.holders(SERVICE_KIND_TRAINER)) == 2, WAIT_S)
        yield fleet
        with fleet.client() as later:  # of another coordinator
            later.scale(SERVICE_KIND_GENERATOR, 1)


def started(fleet: Stack, file: Path) -> dict[str, Any]:
    with fleet.client() as client:
        run = client.start_run(file)
    return {"run_id": run.run_id, "name": run.name, "directory": run.directory}


def generators(fleet: Stack) -> Counter[str]:
    return Counter(fleet.holders(SERVICE_KIND_GENERATOR).values())


def members(fleet: Stack, run: dict[str, Any]) -> float:
    metrics = fleet.metrics(run)
    return metrics[-1]["sync/members"] if metrics else 0


def succeeds(fleet: Stack, run: dict[str, Any]) -> None:
    """A few more steps, then the end, with every sample accounted for."""
    with fleet.client() as client:
        client.set_run(run["run_id"], [f"steps={len(fleet.metrics(run)) + 10}"])
    wait_until(f"the end of {run['name']}", lambda: fleet.state(run) == "succeeded", WAIT_S)
    assert_accounted_for(fleet, run["run_id"])


def test_two_runs_go_on_side_by_side_and_the_last_one_has_the_whole_fleet(
    larger: Stack, tiny_run: Callable[[str, int], dict[str, Any]], tmp_path: Path
) -> None:
    file = written(tmp_path, tiny_run("shared", 100_000))
    first = started(larger, file)
    wait_until("three members", lambda: members(larger, first) == 3, WAIT_S)
    second = started(larger, file)
    for run, count in ((first, 2), (second, 1)):
        wait_until(f"{count} members", lambda run=run, count=count: members(larger, run) == count, WAIT_S)
        with larger.client() as client:
            assert len(client.show_weights(run["run_id"]).generators) == count
    assert generators(larger) == {first["run_id"]: 2, second["run_id"]: 1}
    with pytest.raises(FailedPrecondition, match=f"{first['run_id']} is using .*{second['run_id']} is using"):
        started(larger, file)
    assert larger.flotilla("scale", "generator", "1").code == USAGE

    succeeds(larger, first)
    wait_until("all members", lambda: members(larger, second) == 3, WAIT_S)
    assert generators(larger) == {second["run_id"]: 3}
    succeeds(larger, second)
    assert set(generators(larger)) == {""}
