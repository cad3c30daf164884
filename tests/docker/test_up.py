"""`flotilla up --on compose` on a real Docker engine: the plan runs, a run goes on through a death, nothing is left.

Containers run as the user of the command, and only the coordinator's sees the data. The engine is simulated:
test_containers.py is about vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from composed import run
from engine import TAG

from flotilla_coordinator.ledger.checker import check
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(900)

NAME = "contained"
STEPS = 400  # more than are made before the run is told to end
WAIT_S = 300.0
# What a simulated engine says is no policy's.
SIMULATED = (
    "weights.canary.prompts=0",
    "algorithm.correction.warn_at=null",
    "algorithm.correction.fail_at=null",
)


@pytest.fixture
def stack(docker: str, images: dict[str, str], arithmetic: Path, tmp_path: Path) -> Iterator[Stack]:
    described = {
        "name": NAME,
        "model": str(arithmetic / "model"),
        "state_dir": str(tmp_path / "state"),
        "ready_timeout_s": WAIT_S,
        "generator": {"engine": "sim", "sim": {"seconds_per_token": 0.02}},
        "compose": {"tag": TAG, "data": [str(arithmetic)]},
    }
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(described))
    found = Stack(file, tmp_path / "state" / NAME)
    try:
        yield found
    finally:
        found.flotilla("down", timeout_s=120)


def containers(docker: str) -> dict[str, str]:
    """Return the id of each container of the stack by the name of its service."""
    form = '{{.ID}} {{.Label "com.docker.compose.project"}} {{.Label "com.docker.compose.service"}}'
    lines = [line.split() for line in run([docker, "ps", "--all", "--format", form], 60).splitlines()]
    return {line[2]: line[0] for line in lines if len(line) == 3 and line[1].startswith(f"flotilla-{NAME}-")}


def test_the_commands_of_a_stack_do_the_same_in_containers(
    docker: str, stack: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    planned = {row["node"] for row in stack.ok("up", "--on", "compose", "--plan")["services"]}
    assert stack.ok("up", "--on", "compose", timeout_s=2 * WAIT_S)["changed"]
    assert set(containers(docker)) == planned
    assert not stack.ok("up", timeout_s=WAIT_S)["changed"], "what runs is left as it is"

    file = small_run(arithmetic, tmp_path / "run.yaml", steps=STEPS)
    started = stack.ok("run", "start", str(file), *SIMULATED, "rollout.sample_timeout_s=30")
    wait_until("the first step", lambda: len(stack.metrics(started)) >= 1, WAIT_S)
    stack.ok("scale", "generator", "2", timeout_s=WAIT_S)
    assert "generator-1" in containers(docker)

    pid = run([docker, "inspect", "--format", "{{.State.Pid}}", containers(docker)["generator-0"]], 60)
    psutil.Process(int(pid)).kill()
    done = len(stack.metrics(started))
    wait_until("two steps after a death", lambda: len(stack.metrics(started)) >= done + 2, WAIT_S)
    wait_until("the generator that Docker started again", lambda: ready(stack, "generator-0"), WAIT_S)
    assert "ready" in stack.flotilla("logs", "generator-0").out
    assert stack.flotilla("drain", "generator-0").code != 0, "the launcher keeps it up"

    stack.ok("scale", "generator", "1", timeout_s=WAIT_S)
    assert "generator-1" not in containers(docker)
    stack.ok("run", "set", started["run_id"], f"steps={len(stack.metrics(started)) + 3}")
    wait_until("the end", lambda: stack.state(started) not in ("running", "pending"), WAIT_S)
    assert stack.state(started) == "succeeded"
    verdict = check(stack.directory / "ledger.sqlite", started["run_id"])
    assert verdict.passed and verdict.lost == verdict.trained_twice == 0, str(verdict)

    assert stack.ok("down", timeout_s=120)["stopped"]
    assert not containers(docker)
    assert NAME not in run([docker, "network", "ls", "--format", "{{.Name}}"], 60)
    assert not stack.ok("down")["stopped"]


def ready(stack: Stack, name: str) -> bool:
    listed = stack.flotilla("ps", "--json")
    if listed.code != 0:
        return False
    return any(one["name"] == name and one["state"] == "ready" for one in listed.json["processes"])


def test_a_first_start_that_fails_leaves_no_container(docker: str, stack: Stack) -> None:
    text = yaml.safe_load(stack.file.read_text())
    text["compose"]["tag"] = "none-such"
    stack.file.write_text(yaml.safe_dump(text))
    failed = stack.flotilla("up", "--on", "compose")
    assert failed.code != 0 and "make images" in failed.err
    assert not containers(docker)
