"""Checks of the suites of Slurm and of Ray on a stack that an engine has placed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from flotilla_launch.agent import read_endpoints
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import PlacedFile, read_json
from flotilla_testing.chaos_run import ChaosRun
from flotilla_testing.stack import Stack, wait_until

READY_S = 600.0
GANG_S = 180.0
"""Another gang takes some of it to start on this host."""


def described(name: str, folder: Path, model: Path, **sections: Any) -> Stack:
    """Write a stack file for several nodes."""
    text = {
        "name": name,
        "state_dir": str(folder / "state"),
        "model": str(model),
        "bind": {"host": "0.0.0.0"},
        "ready_timeout_s": READY_S,
        **sections,
    }
    (folder / "stack.yaml").write_text(yaml.safe_dump(text))
    return Stack(folder / "stack.yaml", folder / "state" / name)


@contextlib.contextmanager
def placed(stack: Stack, launcher: str, assert_nothing_is_left: Callable[[], None]) -> Iterator[Stack]:
    """Bring the stack up; whatever the test did, it is down at the end, and nothing of it is left."""
    try:
        stack.ok("up", "--on", launcher, timeout_s=2 * READY_S)
        yield stack
        assert stack.ok("down")["stopped"]
        assert_nothing_is_left()
        assert_files_are_gone(stack)
        assert not stack.ok("down")["stopped"]
    finally:
        stack.flotilla("down")


def fails_without_its_secret(launcher: str, folder: Path, model: Path, **sections: Any) -> Stack:
    """Return a stack that did not come up, because its reward service needs a file that is nowhere."""
    missing = {"TOKEN": {"file": str(folder / "nowhere")}}
    parts = {"generator": {"engine": "sim"}, "trainer": {"replicas": 0}, "reward": {"environment": missing}}
    stack = described(launcher, folder, model, **parts, **sections)
    outcome = stack.flotilla("up", "--on", launcher, timeout_s=READY_S)
    assert outcome.code == 5
    assert "reward-0 did not start" in outcome.err and "TOKEN of reward-0" in outcome.err
    return stack


def assert_up_changes_nothing(stack: Stack, launcher: str) -> None:
    assert not stack.ok("up")["changed"], "an unchanged file changes nothing"
    elsewhere = stack.flotilla("up", "--on", "local")
    assert elsewhere.code == 5 and f"is up on {launcher}" in elsewhere.err


def processes_of(stack: Stack) -> list[list[str]]:
    """Return the command lines that name the stack's directory, but for those that ask about it."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(stack.directory) in word for word in words):
            found.append(words)
    return found


def states(stack: Stack) -> dict[str, str]:
    return {process["name"]: process["state"] for process in stack.ok("ps")["processes"]}


def told(stack: Stack, node: str) -> dict[str, Any]:
    """Return what the agent of a node has written last."""
    return read_json(StackPaths(stack.directory).node_file(node)) or {}


def endpoints(stack: Stack) -> dict[str, Any]:
    return dict(json.loads(StackPaths(stack.directory).endpoints_file.read_text()))


def assert_files_are_gone(stack: Stack) -> None:
    assert processes_of(stack) == []
    paths = StackPaths(stack.directory)
    files = (paths.placed_file, paths.endpoints_file, paths.nodes, paths.launcher_file)
    assert [file for file in files if file.exists()] == []
    assert list(paths.instances.iterdir()) == []


def assert_runs_its_plan(stack: Stack, launcher: str) -> None:
    """Assert that what runs is the table that `up --plan` prints, row by row, on the nodes that it says."""
    rows = {row["name"]: row for row in stack.ok("up", "--on", launcher, "--plan")["services"]}
    paths = StackPaths(stack.directory)
    placed = PlacedFile.read(paths.placed_file)
    assert placed is not None
    addresses = read_endpoints(paths, placed.mark)
    assert addresses is not None
    known = {
        "{nats}": addresses.nats_url,
        "{otlp}": addresses.otlp,
        "{port}": addresses.otlp.rpartition(":")[2],
    }
    running = {}
    for file in paths.nodes.glob("*.json"):
        for process in told(stack, file.stem)["processes"]:
            running[process["name"]] = (file.stem, int(process["pid"]))
    assert {name: node for name, (node, _) in running.items()} == {
        name: row["node"] for name, row in rows.items()
    }
    for name, (_, pid) in running.items():
        expected = [known.get(word, word) for word in rows[name]["command"]]
        assert psutil.Process(pid).cmdline()[-len(expected) :] == expected
        for variable, value in rows[name]["environment"].items():
            assert psutil.Process(pid).environ()[variable] == value


SPREAD = {
    "nproc": 2,
    "rank_timeout_s": 6.0,
    "hosts": [{"name": "a", "ranks": 1}, {"name": "b", "ranks": 1}],
}
AGENT = "trainer-at-b"


def goes_on_after(fault: str, run: ChaosRun, lineage: int) -> None:
    """The run has lost its gang, and makes steps from its newest checkpoint."""
    wait_until(f"a step after {fault}", lambda: run.lineage >= lineage, GANG_S)
    run.wait_for_steps(2, run.lines, f"after {fault}")
