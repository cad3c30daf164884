"""`flotilla up --on compose` on a real Docker engine: the plan runs, a run goes on through a death, nothing is left.

Containers run as the user of the command, and only the coordinator's sees the data. vLLM samples; the canary is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from accounts import assert_accounted_for
from composed import crash
from docker import DockerClient
from docker.models.containers import Container
from engine import TAG

from flotilla_testing.runs import small_run
from flotilla_testing.stack import Stack, wait_until

pytestmark = pytest.mark.timeout(900)

NAME = "contained"
STEPS = 4000  # more than are made before the run is told to end
WAIT_S = 300.0


@pytest.fixture
def stack(docker: DockerClient, images: dict[str, str], arithmetic: Path, tmp_path: Path) -> Iterator[Stack]:
    described = {
        "name": NAME,
        "model": str(arithmetic / "model"),
        "state_dir": str(tmp_path / "state"),
        "ready_timeout_s": WAIT_S,
        "generator": {"dtype": "float32", "max_model_tokens": 64},
        "trainer": {"dtype": "float32"},
        "compose": {"tag": TAG, "data": [str(arithmetic)]},
    }
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(described))
    found = Stack(file, tmp_path / "state" / NAME)
    try:
        yield found
    finally:
        found.flotilla("down", timeout_s=120)


def containers(docker: DockerClient) -> dict[str, Container]:
    """Return each container of the stack by the name of its service, also those that have ended."""
    label = "com.docker.compose.project"
    found = docker.containers.list(all=True, filters={"label": label}, ignore_removed=True)
    ours = [one for one in found if one.labels[label].startswith(f"flotilla-{NAME}-")]
    return {one.labels["com.docker.compose.service"]: one for one in ours}


def test_the_commands_of_a_stack_do_the_same_in_containers(
    docker: DockerClient, stack: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    planned = {row["node"] for row in stack.ok("up", "--on", "compose", "--plan")["services"]}
    assert stack.ok("up", "--on", "compose", timeout_s=2 * WAIT_S)["changed"]
    assert set(containers(docker)) == planned
    assert not stack.ok("up", timeout_s=WAIT_S)["changed"], "what runs is left as it is"

    file = small_run(arithmetic, tmp_path / "run.yaml", steps=STEPS)
    started = stack.ok("run", "start", str(file), "rollout.sample_timeout_s=30")
    wait_until("the first step", lambda: len(stack.metrics(started)) >= 1, WAIT_S)
    stack.ok("scale", "generator", "2", timeout_s=WAIT_S)
    assert "generator-1" in containers(docker)

    crash(containers(docker)["generator-0"])
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
    assert "canary/mean" in stack.metrics(started)[-1]
    assert_accounted_for(stack, started["run_id"])

    assert stack.ok("down", timeout_s=120)["stopped"]
    assert not containers(docker)
    assert not [network for network in docker.networks.list() if NAME in network.name]
    assert not stack.ok("down")["stopped"]


def ready(stack: Stack, name: str) -> bool:
    listed = stack.flotilla("ps", "--json")
    if listed.code != 0:
        return False
    return any(one["name"] == name and one["state"] == "ready" for one in listed.json["processes"])


def test_a_first_start_that_fails_leaves_no_container(docker: DockerClient, stack: Stack) -> None:
    text = yaml.safe_load(stack.file.read_text())
    text["compose"]["tag"] = "none-such"
    stack.file.write_text(yaml.safe_dump(text))
    failed = stack.flotilla("up", "--on", "compose")
    assert failed.code != 0 and "make images" in failed.err
    assert not containers(docker)
